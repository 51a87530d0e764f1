"""Train a length predictor, or resume: `python -m jaxspec.train_predictor --config X.yaml [--set K=V]...`"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.config import ConfigError, parse_overrides
from jaxspec.train_predictor import command as training
from jaxspec.train_predictor.config import PredictorConfig

PROG = "jaxspec.train_predictor"


def main(argv: Sequence[str] | None = None) -> int:
    args = training.parse(PROG, __doc__, "configs/predictor/*.yaml", argv)
    try:  # the optional extra `train`
        from jaxspec.models.load import ModelLoadError
        from jaxspec.train_predictor.data import prepare
        from jaxspec.train_predictor.evaluate import rounded
        from jaxspec.train_predictor.train import Trainer
    except ModuleNotFoundError as error:
        return training.fail(PROG, training.lacking(error))
    try:
        config = PredictorConfig.load(args.config, **parse_overrides(args.set))
        name = Path(args.config).stem
        loaded, data = prepare(config)
        print(f"{name}: {data}", flush=True)
        trainer = Trainer(config, loaded, data)
        metrics = trainer.run(Path(config.work) / name)
        print(json.dumps({"test": rounded(metrics)}), flush=True)
        trainer.predictor(Path(config.out).stem).save(config.out)
    except (ConfigError, ModelLoadError) as error:
        return training.fail(PROG, str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
