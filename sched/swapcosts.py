"""What it costs to move KV between device and host, beside what it costs to compute it."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Seconds, profiled on the engine or at the scale of a paper's machine. Raises `ValueError`.

    They decide between swapping and computing anew, and are what the runtime model (ALISE §3.1) starts from: give them
    where `order` is alise too, although nothing is swapped there.
    """

    #: To move a page from the device to the host, and back, drafters' rows and quantising included.
    offload_page: float
    upload_page: float
    #: A prompt token's share of a step that is full of them.
    prefill_token: float
    #: A step in which requests only decode.
    decode_step: float

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) >= 0:
                raise ValueError(f"{field.name} must not be negative, got {getattr(self, field.name)}")

    def swap(self, pages: int) -> float:
        """Of moving so many pages out and in again."""
        return pages * (self.offload_page + self.upload_page)

    def beside(self, share: float) -> int:
        """Pages, at least one, that go out and others in while a step takes no longer than by this share."""
        page = self.swap(1)
        return max(1, int(share * self.decode_step / page)) if page else 2**31

    def recompute(self, tokens: int) -> float:
        """Of computing the KV of so many tokens anew."""
        return tokens * self.prefill_token
