"""Train a drafter, or resume: `python -m jaxspec.draft.distill --config configs/distill/X.yaml [--set K=V]...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.config import ConfigError, parse_overrides
from jaxspec.draft.distill.config import DistillConfig
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor import curve, ending

PROG = "jaxspec.draft.distill"


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(PROG, __doc__, "configs/distill/*.yaml", argv)
    try:  # the optional extra `train`
        from jaxspec.draft.distill.data import answers_of, corpus_of, lost
        from jaxspec.draft.distill.train import Trainer
        from jaxspec.models.load import ModelLoadError, load_model
        from jaxspec.train_predictor.answers import check_answers, check_readable
    except ModuleNotFoundError as error:
        return training.fail(PROG, training.lacking(error))
    try:
        config = DistillConfig.load(args.config, **parse_overrides(args.set))
        work, run, out = Path(config.work), Path(config.work) / Path(args.config).stem, Path(config.out)
        check_answers("data", config.data, config.target)
        check_readable("begin", [config.begin] if config.begin.endswith(".safetensors") else [])
        training.check_folder("work", run)
        training.check_output("out", out)
        target = load_model(config.target)
        rows, longest = answers_of(config.data, target), min(config.longest, target.config.max_position)
        data = corpus_of(rows, target, longest, work)
        trainer = Trainer(config, target, data)
        print(f"{target.name}, {run.name}: {trainer.about}", flush=True)
        if said := lost(rows, longest, "longest"):
            print(said, flush=True)
        trainer.run(run)
        trainer.export(out)
    except KeyboardInterrupt:
        return ending.interrupted(PROG, argv, "checkpoints and features that were written are kept")
    except (ConfigError, ModelLoadError) as error:
        return training.fail(PROG, str(error))
    if config.parallel:
        print(f"{out} is not written: the engine does not draft in parallel")
        ending.ended(curve.files(run))
    else:
        ending.ended([out, *curve.files(run)], ending.serve_command(config.target, drafter=config.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
