"""A tiny Idefics3 with random weights, made from its config: it takes pictures, cut into rows and columns of tiles.

Run as a program, because it needs torch and transformers: `python -P -m tests.contract.tiny_vlm FOLDER`.
"""

import sys
from pathlib import Path

from tests.contract.tiny_templates import PARTS_TEMPLATE

_MARKS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def make_tiny_vlm(into: Path) -> None:
    """Write the model, its tokenizer and its processor."""
    import torch
    from tokenizers import AddedToken
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
        PreTrainedTokenizerFast,
    )
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    from lorafleet.local.tiny_model import demo_tokenizer

    words = demo_tokenizer()
    words.add_special_tokens([AddedToken(mark, special=True) for mark in (*_MARKS, *_TILES)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
    )
    tokenizer.chat_template = PARTS_TEMPLATE
    sizes = {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = Idefics3VisionConfig(hidden_size=32, image_size=56, patch_size=14, **sizes)
    text = LlamaConfig(
        hidden_size=64,
        num_key_value_heads=2,
        vocab_size=4160,
        max_position_embeddings=2048,
        pad_token_id=0,
        **sizes,
    )
    torch.manual_seed(0)
    config = Idefics3Config(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_id=words.token_to_id("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    Idefics3ForConditionalGeneration(config).save_pretrained(into)
    tiles = Idefics3ImageProcessorPil(
        size={"longest_edge": 112}, max_image_size={"longest_edge": 56}, do_image_splitting=True
    )
    Idefics3Processor(tiles, tokenizer, image_seq_len=4, chat_template=PARTS_TEMPLATE).save_pretrained(into)


if __name__ == "__main__":
    make_tiny_vlm(Path(sys.argv[1]))
