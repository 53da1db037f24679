"""Forebay's side of ``train_vs_trl.py``: a run's components and verbs, no evaluation, no checkpoints.

Usage: python forebay_side.py JOB.json

The loop is that of ``forebay.runs.colocated``, with its timers, metrics and records.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from side_by_side import Job, StepClock, write_result

import forebay.runs.steps as verbs
from forebay.judges import JudgeConfig
from forebay.models import ModelConfig
from forebay.produce import DataConfig
from forebay.runs.build import Run, build_run
from forebay.runs.config import ProduceConfig, RunConfig, TaskConfig
from forebay.runs.folder import new_folder
from forebay.runs.show.display import RunDisplay
from forebay.train import TrainConfig
from forebay.train.config import ADAM
from forebay.types import RolloutState, SampleParams

Groups = list[list[RolloutState]]


def run_config(job: Job) -> RunConfig:
    # What a run file cannot choose must be what the other side was told.
    assert (*job.betas, job.eps) == ADAM, (job.betas, job.eps)
    method = {"clip": job.clip} if job.preset is None else {"preset": job.preset}
    train = TrainConfig(
        lr=job.lr, max_grad_norm=job.max_grad_norm, token_budget=job.micro_batch, layout="shared_prompt", **method
    )
    assert train.optimizer_steps == job.optimizer_steps, (train.optimizer_steps, job.optimizer_steps)
    return RunConfig(
        name="run",
        seed=job.seed,
        steps=job.steps,
        batch_size=job.prompts_per_step,
        rollouts_per_prompt=job.group_size,
        output=Path(job.folder),
        threads=1,
        model=ModelConfig(source=job.model),
        tasks=[
            TaskConfig(
                name="sorting",
                data=DataConfig(source=job.prompts),
                judge=JudgeConfig(name="exact_match", arguments={"partial_credit": True}),
                sample=SampleParams(max_tokens=job.max_tokens),
            )
        ],
        train=train,
        # Presets may bring dynamic sampling, which TRL does not have.
        produce=ProduceConfig(filter="none"),
    )


async def train(run: Run, job: Job, clock: StepClock) -> list[Groups]:
    """The run; returns the groups of every step. What `Job.recording` names is written."""
    trained, recorded = [], []
    await verbs.sync_weights(run)
    clock.mark()
    for train_step in range(1, run.config.steps + 1):
        batch = await verbs.produce(run, train_step)
        if job.recording is not None:
            recorded.append(recording(run, batch.rollout_states))
        metrics = await verbs.fit(run, batch.rollout_states)
        await verbs.sync_weights(run)
        verbs.report(run, train_step, batch, metrics)
        clock.mark()
        trained.append(batch.rollout_states)
    if job.recording is not None:
        Path(job.recording).write_text(json.dumps(recorded), encoding="utf-8")
    return trained


def recording(run: Run, groups: Groups) -> dict[str, list[tuple[int, list[int]]]]:
    """What TRL needs to train on the same rollouts: by prompt text the responses, with their mini-batches."""
    packed = run.trainer.pack(groups)
    parts = {
        packed.rollout_ids[sequence]: number
        for number, sequences in enumerate(packed.mini_batches)
        for sequence in sequences
    }
    return {
        prompt_text(run.tokenizer, group[0]): [
            (parts[state.rollout_id], state.response_ids.tolist()) for state in group
        ]
        for group in groups
    }


def prompt_text(tokenizer: Any, state: RolloutState) -> str:
    """The prompt as text, chat template applied."""
    text: str = tokenizer.apply_chat_template(state.message, tokenize=False, add_generation_prompt=True)
    return text


async def main(job: Job) -> None:
    config, clock = run_config(job), StepClock()
    with RunDisplay(Console(file=io.StringIO())) as display:
        with new_folder(config, overwrite=True) as folder:
            run = build_run(config, folder, display)
        trained = await train(run, job, clock)
    write_result(
        job,
        clock,
        reward=[row["reward"] for row in run.history],
        generate_cpu_s=[row["cpu/generate_s"] for row in run.history],
        response_tokens=[row["response_tokens"] for row in run.history],
        grad_norm=[row["train/grad_norm"] for row in run.history],
        prompt_ids=[sorted(group[0].prompt_ids.tolist() for group in groups) for groups in trained],
    )
    if job.saves:
        run.trainer.model.save_pretrained(job.trained_model)
    await verbs.close(run)


if __name__ == "__main__":
    asyncio.run(main(Job.load(Path(sys.argv[1]))))
