"""Trains a small byte-level GPT-2 with Celo2 in Hugging Face's Trainer.

    pip install 'celo2[torch,recipes]'
    python examples/torch_trainer.py [--steps 100]

Half a minute on one core. The text is Python's own documentation; nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from celo2.torch.trainer import for_trainer

LENGTH = 64


def make_model() -> GPT2LMHeadModel:
    size = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **size))


def make_dataset() -> list[dict]:
    text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8)
    windows = text.long().unfold(0, LENGTH, LENGTH)
    return [{"input_ids": window, "labels": window} for window in windows]


def make_trainer(out: str, steps: int, **more) -> Trainer:
    args = TrainingArguments(
        output_dir=out,
        max_steps=steps,
        per_device_train_batch_size=16,
        learning_rate=4e-3,  # the RMS of the step of a hidden matrix; AdamW's rate is 5 times it
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 20,
        logging_steps=max(1, steps // 5),
        report_to=[],
        use_cpu=True,
        **({"save_strategy": "no"} | more),
    )
    return Trainer(
        make_model(),
        args,
        train_dataset=make_dataset(),
        # Trainer's own groups have no names: this one makes Celo2 from the model.
        optimizer_cls_and_kwargs=for_trainer(args),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", default="runs/trainer")
    options = parser.parse_args()
    set_seed(0)
    trainer = make_trainer(options.out, options.steps)
    print(trainer.create_optimizer().explain())
    trainer.train()


if __name__ == "__main__":
    main()
