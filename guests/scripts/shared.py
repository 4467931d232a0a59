"""What several of these scripts need: a device as usual scripts choose it, windows of a text, a tokenizer of its bytes."""

from pathlib import Path

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Characters(torch.utils.data.Dataset):
    """Windows of a text, as language models take them."""

    def __init__(self, text: str, count: int, length: int = 32) -> None:
        self.tokens, self.count, self.length = torch.tensor(list(text.encode())), count, length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": window, "labels": window}


def text(path: str) -> str:
    return Path(path).read_text()


def tiny_llama(vocabulary: int = 256, **more):
    """Llama of transformers, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, **more,
        )
    )  # fmt: skip


def byte_tokenizer():
    """One token for each letter: nothing is downloaded."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    letters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate(special + letters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
