"""Train a drafter, or go on training: `python -m jaxspec.distill --config configs/distill/X.yaml [--set K=V]...`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec.config import ConfigError, parse_overrides
from jaxspec.distill.config import DistillConfig


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxspec.distill", description=__doc__)
    parser.add_argument("--config", required=True, metavar="YAML", help="a preset, as configs/distill/*.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="may be given again")
    args = parser.parse_args(argv)
    try:  # the optional extra `train`
        from jaxspec.distill.data import corpus
        from jaxspec.distill.train import Trainer
        from jaxspec.models.load import ModelLoadError, load_model
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("optax", "orbax"):
            raise
        return _fail(f"{error.name} is missing, which training needs: pip install 'jaxspec[train]'")
    try:
        config = DistillConfig.load(args.config, **parse_overrides(args.set))
        target = load_model(config.target)
        work, name = Path(config.work), Path(args.config).stem
        data = corpus(config.data, target, config.longest, work)
        held_out = int(data.held_out.sum())
        print(f"{name}: {len(data)} answers, {data.answer_tokens} tokens, {held_out} answers held out", flush=True)
        trainer = Trainer(config, target, data)
        trainer.run(work / name)
        trainer.export(Path(config.out))
    except (ConfigError, ModelLoadError) as error:
        return _fail(str(error))
    return 0


def _fail(why: str) -> int:
    print(f"jaxspec.distill: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
