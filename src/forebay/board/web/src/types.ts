// What the server answers. `npm run build` makes answers.json of it, a JSON schema, and tests/board hold every
// answer of the server against that: a field that is missing, new, or of another kind fails there.

export type Columns = Record<string, (number | null)[]>;
/** Null where nothing scored, or no rollout did. */
type Score = number | null;

/** Each question, by its name in the address, with its answer. */
export interface Answers {
  runs: RunSummary[];
  overview: Overview;
  /** Columns of all train steps, or of those asked for. */
  metrics: Columns;
  steps: Columns;
  flow: Live;
  rollouts: { rows: Found[]; more: boolean };
  count: Count;
  choices: Record<string, { value: string; rollouts: number }[]>;
  group: { members: Member[]; life: LifeEvent[] };
  rollout: { lines: Line[]; pieces: string[] | null; life: LifeEvent[]; spans: Span[] };
  prompts: PromptSummary[];
  prompt: Tried[];
  timeline: Timeline | NoTimeline;
  bias: Bias;
  compare: { here: Evaluated[]; there: Evaluated[] };
  /** Of the stream of events. */
  events: Change;
}

interface State {
  /** Why some of the run cannot be shown, or empty. */
  problem: string;
  /** running, finished, stopped, failed; lost: no sign of life; old: the run wrote no live file. */
  state: string;
  steps: number | null;
  train_step: number;
  unix_time_s: number | null;
  removed: { rollouts: number; spans?: number; until_train_step: number } | null;
}

export interface RunSummary extends State {
  id: string;
  config: null;
}

export interface Facts extends State {
  config: Record<string, unknown>;
}

export interface Overview {
  facts: Facts;
  notes: Note[];
  /** Some columns; `names` has those of all. */
  metrics: Columns;
  names: string[];
  live: Live;
}

/** A warning or message of the run, and where it stood. */
export interface Note {
  unix_time_s: number;
  kind: string;
  text: string;
  train_step: number;
  [more: string]: unknown;
}

/** What is new since the last one. */
export interface Change {
  metrics: Columns;
  /** The columns are all that there are: the run went back to a checkpoint. */
  replace: boolean;
  live: Live;
  notes: Note[];
}

/** The run at this moment; of one that wrote no live file the state and the books. */
export interface Live {
  state: string;
  unix_time_s?: number;
  age_s?: number;
  train_step?: number;
  steps?: number;
  model_step?: number;
  phase?: string;
  /** What is counted; groups, if it is left out. */
  unit?: string;
  tasks?: Record<string, TaskNow>;
  /** Of the producer: how many are at each. */
  stages?: Record<string, number>;
  /** The same, by task. */
  stages_of?: Record<string, Record<string, number>>;
  oldest?: Doing[];
  doing?: Doing[];
  busy?: Record<string, number>;
  stall?: string;
  books?: Record<string, Books>;
  [more: string]: unknown;
}

export interface TaskNow {
  batch: number;
  in_flight: number;
  /** Groups by status. */
  buffer: Record<string, number>;
  /** Completed groups by staleness. */
  ages: Record<string, number>;
  [more: string]: unknown;
}

export interface Doing {
  stage: string;
  name: string;
  age_s: number;
  note: string;
  group?: string | null;
  task?: string | number | null;
}

export interface Books {
  generated: number;
  trained: number;
  live: number;
  /** By reason. */
  dropped: Record<string, number>;
  retried?: number;
  left?: number;
  [more: string]: unknown;
}

/** A rollout that left the run, without its texts. */
interface Listed {
  outcome: string;
  reason: string;
  task: string;
  group_id: string;
  rollout_id: string;
  status: string;
  finish_reason: string;
  train_step: number;
  member: number;
  staleness: number;
  /** -1 where the versions are unknown. */
  first_model_step: number;
  last_model_step: number;
  num_tokens: number;
  prompt_tokens: number;
  /** Text: a browser's numbers have 53 bits. */
  prompt_hash: string;
  time_s: number;
  score: Score;
  advantage: number | null;
  generate_s: number | null;
}

export interface Tried extends Listed {
  prompt: string;
  response: string;
  truth: string;
}

/** Of a list: the texts are cut. */
export interface Found extends Tried {
  error: string;
}

/** `conversation`, `reward` and `facts` are JSON, or empty. */
export interface Member extends Found {
  conversation: string;
  reward: string;
  facts: string;
  /** Data URLs with blanks between, of the prompt and of the replies; not in a history of an older version. */
  images?: string;
  reply_images?: string;
}

/** With its response tokens. */
export interface Line extends Member {
  token_ids: number[];
  mask: number[];
  model_steps: number[];
  logprobs: (number | null)[];
  trainer_logprobs: (number | null)[];
  advantages: (number | null)[];
}

export interface Count {
  rollouts: number;
  groups: number;
  score?: Score;
  num_tokens?: number | null;
  /** Mean score of the same prompts in other steps. */
  solved?: Score;
  staleness?: number | null;
  truncated?: number | null;
}

/** A line of the books about one group. */
export interface LifeEvent {
  time_s: number;
  event: string;
  [said: string]: unknown;
}

/** An activity that has ended. */
export interface Span {
  start_s: number;
  end_s: number;
  stage: string;
  name: string;
  task: string;
  group_id: string;
  note: string;
}

export interface PromptSummary {
  prompt_hash: string;
  task: string;
  prompt: string;
  rollouts: number;
  groups: number;
  score: number;
  best: number;
  spread: number;
  num_tokens: number;
  first_step: number;
  last_step: number;
  first_score: number;
  last_score: number;
  /** Of all prompts: how many never earned anything, and how many there are. */
  never: number;
  prompts: number;
}

export interface Busy {
  stage: string;
  times: number;
  longest_s: number;
  /** In which anything of it was going on. */
  busy_s: number;
}

export interface Timeline {
  from_s: number;
  to_s: number;
  whole: { start_s: number; end_s: number };
  busy: Busy[];
  spans: Span[];
  /** Of stages with too many activities: how many at once, in parts of the time. */
  crowded: Record<string, number[]>;
}

/** Of a run without activities. */
export interface NoTimeline {
  from_s: null;
  spans: Span[];
  busy: Busy[];
  crowded: Record<string, number[]>;
}

export interface Bias {
  means: Mean[];
  spread: Record<string, Bin[]>;
  staleness: Aged[];
}

/** Means of some rollouts. */
export interface Measured {
  task: string;
  rollouts: number;
  num_tokens: number | null;
  generate_s: number | null;
  solved: Score;
  score: Score;
}

export interface Aged extends Measured {
  staleness: number;
}

export interface Mean extends Measured {
  outcome: string;
  reason: string;
  num_tokens_spread: number | null;
  generate_s_spread: number | null;
  solved_spread: number | null;
  score_spread: number | null;
  num_tokens_90: number | null;
}

export interface Bin {
  outcome: string;
  bin: number;
  low: number;
  width: number;
  rollouts: number;
}

export interface Evaluated {
  prompt_hash: string;
  train_step: number;
  task: string;
  prompt: string;
  score: Score;
  response: string;
  rollout_id: string;
}
