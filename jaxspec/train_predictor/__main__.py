"""Train a length predictor, or go on training: `python -m jaxspec.train_predictor --config X.yaml [--set K=V]...`"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.config import ConfigError, parse_overrides
from jaxspec.train_predictor.config import PredictorConfig


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxspec.train_predictor", description=__doc__)
    parser.add_argument("--config", required=True, metavar="YAML", help="a preset, as configs/predictor/*.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given again")
    args = parser.parse_args(argv)
    try:  # the optional extra `train`
        from jaxspec.models.load import ModelLoadError
        from jaxspec.train_predictor.metrics import rounded
        from jaxspec.train_predictor.prepare import prepare
        from jaxspec.train_predictor.train import Trainer
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("optax", "orbax"):
            raise
        return _fail(f"{error.name} is missing, which training needs: pip install 'jaxspec[train]'")
    try:
        config = PredictorConfig.load(args.config, **parse_overrides(args.set))
        name = Path(args.config).stem
        loaded, data = prepare(config)
        print(f"{name}: {data}", flush=True)
        trainer = Trainer(config, loaded, data)
        found = trainer.run(Path(config.work) / name)
        print(json.dumps({"test": rounded(found)}), flush=True)
        trainer.predictor(Path(config.out).stem).save(config.out)
    except (ConfigError, ModelLoadError) as error:
        return _fail(str(error))
    return 0


def _fail(why: str) -> int:
    print(f"jaxspec.train_predictor: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
