"""torchtitan's own entry point, begun in a folder that has what its defaults look for in its repository.

`torchtitan_debug.py TEXT [--OPTION …]` writes tests/assets/tokenizer and tests/assets/c4_test, which the wheel leaves
out, where it stands; then it is `python -m torchtitan.train --module llama3 --config llama3_debugmodel [--OPTION …]`.
"""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>")


def write_tokenizer(folder, texts):
    """Of 2,000 tokens, as theirs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2000, special_tokens=list(SPECIAL), show_progress=False)
    )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def write_texts(folder, texts):
    folder.mkdir(parents=True)
    (folder / "data.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_assets(text):
    """Each rank writes them for itself; those of the first stand."""
    assets, own = Path("tests/assets"), Path(f"assets_{os.environ['RANK']}")
    size = 1000
    texts = [text[start : start + size] for start in range(0, 200 * size, size)]
    write_tokenizer(own / "tokenizer", texts)
    write_texts(own / "c4_test", texts)
    assets.parent.mkdir(exist_ok=True)
    try:
        own.rename(assets)
    except OSError:
        shutil.rmtree(own)


if __name__ == "__main__":
    _, text, *options = sys.argv
    write_assets(Path(text).read_text())
    # PyTorch 2.13 has it by another name only.
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = torch.distributed.distributed_c10d._set_pg_timeout
    sys.argv[1:] = ["--module", "llama3", "--config", "llama3_debugmodel", *options]
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
