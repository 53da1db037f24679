"""TRL's side of ``train_vs_trl.py``: `GRPOTrainer`, run by the Python of TRL's own environment.

Usage: python trl_side.py JOB.json

Nothing of forebay is imported here. `MeasuredTrainer` adds two time stamps per step and keeps references to
what the trainer made; it changes nothing but the schedule of the rate in a run of DAPO.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from side_by_side import Job, StepClock, cpu_seconds, write_result
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer import grpo_trainer


def share_of_places(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The reward: how many places of the answer are right, over the longer of the two lengths."""
    pairs = [(completion.strip(), truth) for completion, truth in zip(completions, answer, strict=True)]
    return [
        sum(a == b for a, b in zip(given, truth, strict=False)) / max(len(given), len(truth)) for given, truth in pairs
    ]


METHODS: dict[str | None, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
}
"""By preset, what TRL's documentation gives for the two papers."""
OVERLONG = 0.2
"""The share of the response budget over whose end DAPO's soft penalty rises."""
RISE = {"dapo": 20}
"""Batches over which the learning rate rises."""


class MeasuredTrainer(GRPOTrainer):  # type: ignore[misc]
    def __init__(self, job: Job, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._job = job
        self.made: list[dict[str, torch.Tensor]] = []
        self.rewards: list[float] = []
        self.generate_cpu_s: list[float] = []

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """A rise by batches, as in the paper; TRL's own would go by optimizer steps."""
        rise = RISE.get(str(self._job.preset), 1)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer if optimizer is None else optimizer,
            lambda step: min(1.0, (step // self._job.optimizer_steps + 1) / rise),
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        started = cpu_seconds()
        output = super()._generate_and_score_completions(inputs)
        self.generate_cpu_s.append(cpu_seconds() - started)
        # The first reward function's, without a penalty of the length.
        self.rewards.append(self._metrics["train"]["rewards/share_of_places/mean"][-1])
        names = ("prompt_ids", "prompt_mask", "completion_mask")
        self.made.append({name: output[name] for name in names})
        return output


class MarkSteps(TrainerCallback):  # type: ignore[misc]
    def __init__(self, clock: StepClock, optimizer_steps: int) -> None:
        self._clock = clock
        self._optimizer_steps = optimizer_steps

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._clock.mark()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step % self._optimizer_steps == 0:
            self._clock.mark()


def trainer_config(job: Job) -> GRPOConfig:
    mini_batch = job.samples_per_step // job.optimizer_steps
    micro_batch = min(job.micro_batch, mini_batch)
    assert job.samples_per_step % job.optimizer_steps == mini_batch % micro_batch == 0, job
    method = {"loss_type": "dapo", "epsilon": job.clip, "epsilon_high": job.clip}
    return GRPOConfig(
        output_dir=job.folder,
        seed=job.seed,
        # One generation per batch and one optimizer step per mini-batch; micro-batches only split the forward
        # passes.
        max_steps=job.steps * job.optimizer_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=mini_batch // micro_batch,
        steps_per_generation=job.samples_per_step // micro_batch,
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
        # Without a preset: the sum of the token losses over the number of tokens in the whole batch.
        **METHODS.get(job.preset, method),
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
    rewards: list[Any] = [share_of_places]
    if job.preset == "dapo":
        rewards.append(get_soft_overlong_punishment(job.max_tokens, OVERLONG * job.max_tokens))
    return MeasuredTrainer(
        job,
        model=job.model,
        processing_class=AutoTokenizer.from_pretrained(job.model),
        reward_funcs=rewards,
        args=trainer_config(job),
        train_dataset=Dataset.from_json(job.prompts),
        callbacks=[MarkSteps(clock, job.optimizer_steps)],
        rollout_func=None if job.recording is None else replay(Path(job.recording)),
    )


def replay(path: Path) -> Any:
    """A rollout function that gives back the recorded responses, the next step's at every call.

    The mini-batches become the recorded ones, too: TRL would draw them.
    """
    steps = iter(json.loads(path.read_text(encoding="utf-8")))
    parts: list[int] = []

    def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        responses = {prompt: iter(rows) for prompt, rows in next(steps).items()}
        parts[:], completions = zip(*(next(responses[prompt]) for prompt in prompts), strict=True)
        return {
            "prompt_ids": trainer.processing_class(text=prompts)["input_ids"],
            "completion_ids": list(completions),
            "logprobs": None,
        }

    def arrange(columns: dict[str, Any]) -> dict[str, Any]:
        order = torch.tensor(parts).argsort(stable=True)
        return {
            name: rows[order] if isinstance(rows, torch.Tensor) and rows.ndim else rows
            for name, rows in columns.items()
        }

    grpo_trainer.shuffle_sequence_dict = arrange
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
    norms = [float(row["grad_norm"]) for row in trainer.state.log_history if "grad_norm" in row]
    every = job.optimizer_steps
    write_result(
        job,
        clock,
        reward=trainer.rewards,
        generate_cpu_s=trainer.generate_cpu_s,
        response_tokens=[float(made["completion_mask"].sum(1).float().mean()) for made in trainer.made],
        grad_norm=[statistics.mean(norms[at : at + every]) for at in range(0, len(norms), every)],
        prompt_ids=[prompts_of(made) for made in trainer.made],
    )
    if job.saves:
        trainer.save_model(str(job.trained_model))


if __name__ == "__main__":
    main(Job.load(Path(sys.argv[1])))
