"""Small input files for the commands of the pages, under the names that the pages use, and a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from helpers import checkpoints
from helpers.doc_commands import ROOT

#: Contents of the presets that the pages name. A truncated drafter stands for trained ones, which need their target.
PRESETS = {
    "none.yaml": "draft: none\n",
    "cold.yaml": "draft: [suffix, truncated:1]\nsuffix_tokens: 0\n",
    "again.yaml": "draft: [suffix, truncated:1]\n",
    "warm.yaml": "draft: [suffix, truncated:1]\n",
    "chain.yaml": "draft: [truncated:1]\ntree: chain\ndraft_depth: 3\n",
    "fcfs.yaml": "order: fcfs\ndraft: [ngram]\n",
    "sjf.yaml": "order: sjf\npredictor: oracle\ndraft: [ngram]\n",
    "PRESET.yaml": "draft: [truncated:1]\ntree: chain\ndraft_depth: 3\n",
}
_PROMPT_FILES = (
    "alpaca", "alpaca_gpt4", "alpaca_libre", "chatgpt_prompts", "gpteacher", "gsm8k", "humaneval", "math500", "mbpp",
    "multi_turn",
)  # fmt: skip
_SUBJECTS = ("owls", "rivers", "snow", "the moon", "bread", "glass", "a fox", "old maps")
_ASKED = ("Name {}", "List {} {}", "Explain {} to a child", "Write four lines of verse about {} and {}", "Why {}?")


def write(folder: Path) -> None:
    """Write all files that the commands read, including those that other commands of the pages produce."""
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "path" / "to").mkdir(parents=True)
    model(folder / "path" / "to" / "folder")
    for name, text in PRESETS.items():
        (folder / name).write_text(text)
    rows = conversations(40)
    for name in _PROMPT_FILES:
        jsonl(folder / "DATA" / "prompts" / f"{name}.jsonl", rows)
    models = "llama-2-7b-chat-hf", "llama-2-13b-chat-hf"
    answers = [
        {**row, "other_references": {models[0]: row["reference"]},
         "reference_words": dict.fromkeys(models, len(row["reference"].split()))}
        for row in rows
    ]  # fmt: skip
    jsonl(folder / "DATA" / "prompts" / "alpaca_eval.jsonl", answers)
    for name in ("prompts.jsonl", "FILE", "KNOWN.jsonl"):
        jsonl(folder / name, rows)
    (folder / "TEXT").write_text("Owls fly by night, and nobody hears them. " * 40)
    steps = range(200)
    pairs = [(12 + 7 * i % 90, 3 + 11 * i % 120) for i in steps]
    trace = [f"{0.31 * i + 0.2 * (i % 3):.3f},{a},{b}" for i, (a, b) in zip(steps, pairs, strict=True)]
    traced = ["arrival_s,input_tokens,output_tokens", *trace]
    lines(folder / "DATA" / "traces" / "azure_llm_2023_conv.csv", traced)
    lines(folder / "DATA" / "traces" / "azure_functions_2021_sample.csv", traced)
    jsonl(
        folder / "DATA" / "traces" / "mooncake_conversation.jsonl",
        [{"timestamp": 300 * i, "input_length": 600, "output_length": 9, "hash_ids": [i % 4, 9 + i]} for i in steps],
    )
    lines(folder / "FILE.csv", ["arrival_s,input_tokens,output_tokens", *(f"{0.01 * i},9,4" for i in range(8))])
    for name in ("sharegpt_first_round", "arxiv_summarization"):
        lines(
            folder / "DATA" / "lengths" / f"{name}.csv", ["input_tokens,output_tokens", *(f"{a},{b}" for a, b in pairs)]
        )
    classes = [f"{b},{int(b > 60)},{min(4, b // 24)},7.5" for _, b in pairs]
    header = "output_tokens,pred_class3,pred_class5,predict_ms"
    lines(folder / "DATA" / "lengths" / "ssjf_vicuna13b_predictions.csv", [header, *classes])


def answered(folder: Path) -> None:
    """Write the files that `jaxspec.train_predictor.collect` and `.predictions` produce."""
    rows = [
        {"prompt": row["turns"][0], "length": 2 + 7 * i % 50, "capped": i % 9 == 0}
        for i, row in enumerate(conversations(120))
    ]
    for name in ("folder", "smollm2-135m"):
        jsonl(folder / "trained" / name / "answers.jsonl", rows)
    ids = [
        {"prompt_ids": [5 + i, 9, 7], "output_ids": list(range(3, 40)), "finished": True, "temperature": 0.8}
        for i in range(60)
    ]
    for file in ("sampled.jsonl", "predictor/sampled.jsonl"):
        jsonl(folder / file, ids)
    predicted = dict.fromkeys(("proxy", "retrieval", "blend"), 9.0) | {"every": 8, "left": [4.0, 3.0]}
    made = [{"input_tokens": 9, "output_tokens": row["length"], **predicted} for row in rows]
    jsonl(folder / "predictor" / "predictions.jsonl", made)


def conversations(count: int) -> list[dict]:
    """Distinct prompts with a reference answer and more turns."""
    made = []
    for i in range(count):
        first, second = _SUBJECTS[i % 8], _SUBJECTS[i // 8 % 8]
        asked = f"{_ASKED[i % 5].format(first, second)} (number {i})"
        reply = f"So it is with {first}. " * (1 + i % 5)
        replies = [reply, "Nothing more.", *(f"{reply}{first}" for _ in range(3))]
        turns = {"turns": [asked, "And then?", "Why?", "How?", "And you?"], "reference": reply, "replies": replies}
        made.append({"id": f"q{i}", **turns})
    return made


def model(folder: Path) -> Path:
    """Write a random model of 16 layers, for `truncated:15`, as a Hugging Face folder. Most outputs are short."""
    config = checkpoints.config(hidden_size=32, intermediate_size=32, num_layers=16, max_position=2048)
    tensors = checkpoints.hf_tensors(config)
    tensors["lm_head.weight"][1] *= 2  # of the end token: its logit is the greatest once in fifteen tokens or so
    return checkpoints.write_hf(folder, config, [tensors])


def jsonl(path: Path, rows: list[dict]) -> None:
    lines(path, [json.dumps(row) for row in rows])


def lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(texts) + "\n")
