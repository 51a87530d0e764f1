"""Train a drafter, or resume: `python -m jaxspec.draft.distill --config configs/distill/X.yaml [--set K=V]...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.config import ConfigError, parse_overrides
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.train_predictor import command as training

PROG = "jaxspec.draft.distill"


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(PROG, __doc__, "configs/distill/*.yaml", argv)
    try:  # the optional extra `train`
        from jaxspec.draft.distill.data import corpus
        from jaxspec.draft.distill.train import Trainer
        from jaxspec.models.load import ModelLoadError, load_model
        from jaxspec.train_predictor.answers import check_readable
    except ModuleNotFoundError as error:
        return training.fail(PROG, training.lacking(error))
    try:
        config = DistillConfig.load(args.config, **parse_overrides(args.set))
        check_readable("data", config.data)
        check_readable("begin", [config.begin] if config.begin.endswith(".safetensors") else [])
        target = load_model(config.target)
        work, name = Path(config.work), Path(args.config).stem
        data = corpus(config.data, target, config.longest, work)
        held_out = int(data.held_out.sum())
        print(f"{name}: {len(data)} answers with {data.answer_tokens} tokens, {held_out} of them held out", flush=True)
        trainer = Trainer(config, target, data)
        trainer.run(work / name)
        trainer.export(Path(config.out))
        if config.parallel:
            print(f"{config.out} is not written: the engine does not draft in parallel")
    except (ConfigError, ModelLoadError) as error:
        return training.fail(PROG, str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
