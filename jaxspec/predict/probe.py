"""The length probe that the config names."""

from __future__ import annotations

import logging
from pathlib import Path

from jaxspec.config import ConfigError, EngineConfig
from jaxspec.errors import ModelLoadError
from jaxspec.models.length_probe import LengthProbe
from jaxspec.models.load import LoadedModel
from jaxspec.models.load.probe_file import load_probe
from jaxspec.predict import PROBES, shipped
from jaxspec.sched.slots import MEMORIES, ORDERS, PACES, Need

log = logging.getLogger(__name__)

AUTO = "auto"
#: Model's name -> the shipped probe for it.
DEFAULT = {"smollm2-135m": "smollm2-probe"}


def build(config: EngineConfig, target: LoadedModel) -> LengthProbe | None:
    """The probe for the target: none, a shipped one by name, a file, or with `auto` the shipped one for this model.

    `auto` is none where no policy reads lengths, lengths are known (an oracle predicts), or no probe ships. That the
    shipped one does not fit (the name may be another model's) is a warning. Raises `ConfigError` if a probe that is
    named cannot be loaded, or nothing reads it.
    """
    name = config.length_probe
    if name is None:
        return None
    read = any({Need.LENGTHS, Need.RUNTIME} & slot.selected(config).needs for slot in (ORDERS, MEMORIES, PACES))
    files = shipped(PROBES)
    if name == AUTO:
        path = files.get(DEFAULT.get(target.name, ""))
        if path is None or not read or config.policy.predictor in ("oracle", "noisy_oracle"):
            return None
        try:
            return load_probe(path, target.config)
        except ModelLoadError as error:
            log.warning("lengths are not predicted again: %s", error)
            return None
    if not read:
        raise ConfigError(f"length_probe: neither order {config.policy.order} nor the other policies read lengths")
    try:
        return load_probe(files.get(name) or Path(name).expanduser(), target.config)
    except ModelLoadError as error:
        raise ConfigError(f"length_probe: {error} (probes by name: {', '.join([AUTO, *files])})") from None
