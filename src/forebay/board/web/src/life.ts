// The life of a rollout in words, from its tokens, the books and the activities.

import { duration, number } from "./dom";
import { stageText, type Judges } from "./judges";
import type { LifeEvent, Line, Span } from "./types";

/** What became of it, one sentence for each thing, in their order. */
export function lifeInWords(row: Line, life: LifeEvent[], all: Span[], judges: Judges): string[] {
  // A held-out prompt is tried again under its name by every evaluation: this is of the last.
  const spans = row.outcome === "evaluated" ? [...new Map(all.map((span) => [span.stage, span])).values()] : all;
  const last = (event: string) => life.filter((one) => one.event === event).at(-1);
  const seconds = (stage: string) => spans.filter((span) => span.stage === stage).reduce((sum, span) => sum + span.end_s - span.start_s, 0);
  const said: string[] = [];
  const queued = seconds("queued");
  if (queued >= 0.1) said.push(`waited ${duration(queued)} for its turn`);
  const generated = seconds("generate") || row.generate_s || 0;
  said.push(...sampled(row, generated));
  const retried = life.filter((one) => one.event === "retried").length;
  if (retried) said.push(`interrupted, and its group taken up again ${retried === 1 ? "once" : `${number(retried)} times`}`);
  const tools = seconds("tool");
  if (tools) said.push(`waited ${duration(tools)} of that for tools or its environment`);
  const judged = spans.filter((span) => span.stage === "judge");
  if (judged.length) said.push(`judged in ${duration(seconds("judge"))}${byName(judged[0], judges)}: score ${number(row.score)}`);
  const left = last("trained") ?? last("dropped");
  // The moment at which its group lay ready.
  const stored = spans.filter((span) => span.stage === "put").at(-1)?.end_s ?? last("produced")?.time_s;
  if (left && stored !== undefined && left.time_s >= stored) said.push(`waited ${duration(left.time_s - stored)} in the buffer`);
  if (row.outcome === "trained" || row.outcome === "reused") said.push(`trained at step ${row.train_step}, ${number(row.staleness)} ${row.staleness === 1 ? "step" : "steps"} stale`);
  else if (row.outcome === "dropped") said.push(`dropped at step ${row.train_step}: ${row.reason || "no reason was given"}`);
  else said.push(`evaluated after step ${row.train_step}`);
  return said;
}

function byName(span: Span, judges: Judges): string {
  const name = stageText(span.stage, span.task, judges);
  return name === span.stage ? "" : ` by ${name.slice(span.stage.length + 1)}`;
}

/** By which weights, one sentence for each version of them. */
function sampled(row: Line, seconds: number): string[] {
  const said: string[] = [];
  const took = seconds ? ` in ${duration(seconds)}` : "";
  // Of a response that was wiped the number is known.
  if (!row.model_steps.length && !row.num_tokens) return [`no token was sampled${took}`];
  let version = -1;
  row.model_steps.forEach((step, at) => {
    // Of what an environment said no weights are known.
    if (step < 0 || step === version) return;
    said.push(version < 0 ? `sampled${took} by version ${step} of the weights` : `continued on version ${step}, from token ${number(at)} of ${number(row.model_steps.length)}`);
    version = step;
  });
  return said.length ? said : [`sampled${took}; by which weights is not known`];
}
