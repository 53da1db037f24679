"""TRL's side of ``train_vs_trl.py``: `GRPOTrainer`, run by the Python of TRL's own environment.

Usage: python trl_side.py JOB.json

Nothing of forebay is imported here. `MeasuredTrainer` adds two time stamps per step and keeps references to
what the trainer made; it changes nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from side_by_side import Job, StepClock, cpu_seconds, write_result
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def share_of_places(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward: how many places of the answer are right, over the longer of the two lengths."""
    pairs = [(completion.strip(), truth) for completion, truth in zip(completions, answer, strict=True)]
    return [
        sum(a == b for a, b in zip(given, truth, strict=False)) / max(len(given), len(truth))
        for given, truth in pairs
    ]


class MeasuredTrainer(GRPOTrainer):  # type: ignore[misc]
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.made: list[dict[str, torch.Tensor]] = []
        self.rewards: list[float] = []
        self.generate_cpu_s: list[float] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = cpu_seconds()
        output = super()._generate_and_score_completions(inputs)
        self.generate_cpu_s.append(cpu_seconds() - started)
        self.rewards.append(self._metrics["train"]["reward"][-1])
        names = ("prompt_ids", "prompt_mask", "completion_mask")
        self.made.append({name: output[name] for name in names})
        return output


class MarkSteps(TrainerCallback):  # type: ignore[misc]
    def __init__(self, clock: StepClock) -> None:
        self._clock = clock

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.mark()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._clock.mark()


def trainer_config(job: Job) -> GRPOConfig:
    assert job.samples_per_step % job.micro_batch == 0, (job.samples_per_step, job.micro_batch)
    return GRPOConfig(
        output_dir=job.folder,
        seed=job.seed,
        # One generation and one optimizer step per batch; micro-batches only split the forward passes.
        max_steps=job.steps,
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.samples_per_step // job.micro_batch,
        num_generations=job.group_size,
        num_iterations=1,
        shuffle_dataset=False,
        max_completion_length=job.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        use_transformers_continuous_batching=job.continuous_batching,
        optim="adamw_torch_fused",
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        adam_beta1=job.betas[0],
        adam_beta2=job.betas[1],
        adam_epsilon=job.eps,
        weight_decay=0.0,
        max_grad_norm=job.max_grad_norm,
        epsilon=job.clip,
        epsilon_high=job.clip,
        # The sum of the token losses over the number of tokens in the whole batch.
        loss_type="dapo",
        scale_rewards="group",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        # Only a replay needs the gradient norms, which come from the log.
        logging_strategy="no" if job.recording is None else "steps",
        logging_steps=1,
    )


def build_trainer(job: Job, clock: StepClock) -> MeasuredTrainer:
    return MeasuredTrainer(
        model=job.model,
        processing_class=AutoTokenizer.from_pretrained(job.model),
        reward_funcs=share_of_places,
        args=trainer_config(job),
        train_dataset=Dataset.from_json(job.prompts),
        callbacks=[MarkSteps(clock)],
        rollout_func=None if job.recording is None else replay(Path(job.recording)),
    )


def replay(path: Path) -> Any:
    """A rollout function that gives back the recorded responses, the next step's at every call."""
    steps = iter(json.loads(path.read_text(encoding="utf-8")))

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        responses = {prompt: iter(ids) for prompt, ids in next(steps).items()}
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": [next(responses[prompt]) for prompt in prompts],
            "logprobs": None,
        }

    return rollouts


def prompts_of(made: dict[str, torch.Tensor]) -> list[list[int]]:
    """The distinct prompts of a step as token ids, without padding, sorted."""
    rows = zip(made["prompt_ids"], made["prompt_mask"].bool(), strict=True)
    return sorted(map(list, {tuple(ids[mask].tolist()) for ids, mask in rows}))


def main(job: Job) -> None:
    torch.set_num_threads(1)
    clock = StepClock()
    trainer = build_trainer(job, clock)
    trainer.train()
    log = [row for row in trainer.state.log_history if "grad_norm" in row]
    write_result(
        job,
        clock,
        reward=trainer.rewards,
        generate_cpu_s=trainer.generate_cpu_s,
        response_tokens=[float(made["completion_mask"].sum(1).float().mean()) for made in trainer.made],
        grad_norm=[row["grad_norm"] for row in log],
        prompt_ids=[prompts_of(made) for made in trainer.made],
    )
    if job.recording is not None:
        trainer.save_model(str(job.trained_model))


if __name__ == "__main__":
    main(Job.load(Path(sys.argv[1])))
