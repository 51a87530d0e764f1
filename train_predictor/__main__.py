"""Train a length predictor, or resume: `python -m jaxspec.train_predictor --config X.yaml [--set K=V]...`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.config import ConfigError, parse_overrides
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor import curve, ending
from jaxspec.train_predictor.answers import check_answers
from jaxspec.train_predictor.config import PredictorConfig
from jaxspec.train_predictor.names import target_name

PROG = "jaxspec.train_predictor"


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(PROG, __doc__, "configs/predictor/*.yaml", argv)
    try:  # the optional extra `train`
        from jaxspec.models.load import ModelLoadError
        from jaxspec.train_predictor.data import prepare
        from jaxspec.train_predictor.train import Trainer
    except ModuleNotFoundError as error:
        return training.fail(PROG, training.lacking(error))
    try:
        config = PredictorConfig.load(args.config, **parse_overrides(args.set))
        run, out = Path(config.work) / Path(args.config).stem, Path(config.out)
        check_answers("data", config.data, config.target)
        training.check_folder("work", run)
        training.check_output("out", out)
        loaded, data = prepare(config)
        print(f"{target_name(config.target)}, {run.name}: {data}", flush=True)
        trainer = Trainer(config, loaded, data)
        trainer.run(run)
        trainer.predictor(out.stem).save(out)
    except KeyboardInterrupt:
        return ending.interrupted(PROG, argv, "checkpoints that were written are kept")
    except (ConfigError, ModelLoadError) as error:
        return training.fail(PROG, str(error))
    files = [out, run / "report.json", *curve.files(run)]
    ending.ended(files, ending.serve_command(config.target, predictor=config.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
