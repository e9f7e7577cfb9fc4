"""The typed configuration: every section, every field, its default, its accepted values, and what it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..core.fields import target
from ..core.options import option

Target = dict[str, Any]
"""A node with `_target_: package.module.Name` or `./file.py:Name` (relative to the config file) plus its arguments."""


@dataclass
class DataConfig:
    train: Target | None = field(default=None, metadata=target())
    """Training data: the `_target_` of a Dataset, a DataLoader, or anything that can be iterated over repeatedly."""
    eval: Target | None = field(default=None, metadata={**target(), "by_name": True})
    """Evaluation data; without it nothing is evaluated. Several sets by name, each a `_target_` of its own, give metrics like
    `test/loss`; `loop.monitor` without a name is that of the first."""
    batch_size: int = option(32, ge=1)
    """Samples per micro-batch, for data given as a Dataset."""
    shuffle: bool = True
    """Visit the training samples in a new order each epoch; the order depends on `seed` and the epoch only."""
    drop_last: bool = False
    """Leave out the last training batch of an epoch if it is smaller than `batch_size`. Evaluation uses all samples."""
    num_workers: int = option(0, ge=0)
    """Loader processes, for data given as a Dataset."""
    collate_fn: Target | None = field(default=None, metadata=target(num_injected=1))
    """How samples are put into a batch, for data given as a Dataset: the `_target_` of a function of a list of samples, or of a class whose
    instances are called with it. Without it, torch's default."""
    skip_unreadable: bool = False
    """Leave out samples whose reading raises, of a Dataset or a DataLoader over one: each is named, listed in `quarantine.jsonl`, and not
    asked for again. When more than 5% of those read so far raise, the run ends. `false`: the first one ends the run."""
    sharded: bool = False
    """With several processes: the data gives each of them its own part already (a `DistributedSampler` is recognised without this).
    Otherwise every process is given all of the data, and takes its own part of it."""


@dataclass
class LoopConfig:
    max_steps: int | None = option(None, ge=1)
    """Stop after this many committed optimizer steps."""
    max_epochs: int | None = option(None, ge=1)
    """Stop after this many passes over the data. Without `max_steps` and `max_epochs`: one pass."""
    max_hours: float | None = option(None, gt=0.0)
    """Save and end normally when this process has trained for this long; `safetrain resume` continues from there."""
    end_on_signals: list[str] = option(  # noqa: RUF009
        factory=lambda: ["SIGHUP", "SIGUSR1", "SIGUSR2"], choices=("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGQUIT")
    )
    """Signals that, like SIGTERM and SIGINT, let the run finish its step, save and end: a closed terminal, or what a scheduler sends
    before its time limit (Slurm's `--signal=USR1@120`). One that the program handles or ignores itself (`nohup`) is left alone."""
    grad_accum: int = option(1, ge=1)
    """Micro-batches per optimizer step; the loss is their mean."""
    eval_every: int | None = option(None, ge=1)
    """Evaluate every N committed steps; null: at the end of each epoch."""
    monitor: str = "loss"
    """The evaluation metric by which the best step is chosen. NaN is worse than any number."""
    monitor_mode: str = option("min", choices=("min", "max"))
    """Whether a smaller or a larger `monitor` is better."""
    eval_at_start: bool = False
    """Also evaluate before the first step."""
    eval_check: bool = True
    """Evaluate one batch before the first step and forget the result, so that a mistake in the evaluation shows at once."""
    patience: int | None = option(None, ge=1)
    """Early stopping: end the run, as if it had reached its last step, when N evaluations in a row have brought no better
    `monitor`; null: never."""
    min_delta: float = option(0.0, ge=0.0, needs=("patience",))
    """`patience`: how much better than the best so far counts as better."""
    log_every: int = option(10, ge=1)
    """Print and write metrics every N steps."""
    precision: str = option("fp32", choices=("fp32", "bf16", "fp16"))
    """Arithmetic of the forward pass; `bf16` and `fp16` use autocast, weights stay as they are."""
    strategy: str = option("ddp", choices=("ddp", "fsdp"))
    """What several processes share: with `ddp` each has the whole model; with `fsdp` (FSDP2) each holds a part of every
    parameter, gradient and moment, and the model may be larger than one device. A single process has all of it either way."""
    shard_blocks: list[str] = field(default_factory=list)
    """fsdp: globs over names (`"blocks.*"`) or types (`Block`) of the modules that are gathered one at a time. Without any, the
    elements of every `ModuleList`. fp32 islands are gathered one by one."""
    shard_dtype: str = option("fp32", choices=("fp32", "bf16", "fp16"))
    """fsdp: the type in which gathered parameters are sent and computed with; islands stay in float32, gradients are summed in
    it, and so is the update. `bf16` halves the traffic. With `fp32`, `precision` alone decides, as it does with ddp."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`, `mps`, …"""
    keep_memory: bool = True
    """On a CPU with Linux's usual C library: what a step frees (up to 1 GB) stays with the process for the next step, which then
    takes up to a fifth less time. `safetrain fit` and `resume` set it for the whole process, unless the environment has a setting
    for it; a program that uses SafeTrainer itself is left alone."""
    compile: bool | str = False
    """Compile the model with `torch.compile`; a string names the backend."""
    on_out_of_memory: str = option("stop", choices=("stop", "halves"))
    """A step that does not fit into memory is tried once more after what is cached was freed. Then `stop`: the run is saved and ends. `halves`:
    each of its batches is split in two and their gradients are averaged, as `grad_accum` does; statistics over a batch (BatchNorm) are
    then those of half a batch. One process only."""
    compile_mode: str | None = option(
        None, choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    )
    """How `torch.compile` trades time of compilation for speed, as its `mode`; null: its default."""
    num_processes: int | None = option(None, ge=1)
    """How many processes the run must have; another number is an error at start. null: as many as were started."""
    rank_timeout_seconds: float = option(1800.0, gt=0.0)
    """With several processes: how long one waits for another before the run ends with the name of the one that is missing.
    Longer than the slowest thing that one rank does alone, such as writing a checkpoint."""
    hang_timeout_seconds: float | None = option(None, gt=0.0)
    """What takes five times as long as usual (a step, an evaluation batch, a save), and at least five seconds, is reported with the line
    where it hangs, and training goes on. After this long it also ends the run, at that line. null: one process waits for ever, one
    of several until the others give up, see `rank_timeout_seconds`."""
    deterministic: bool = False
    """Use deterministic algorithms only; an operation that has none raises."""
    ema: float | None = option(None, gt=0.0, lt=1.0)
    """Decay of an exponential moving average of the weights; evaluation then uses the average."""
    host_read_every: int = option(1, ge=1)
    """Bring the numbers of a step to the host only every N steps. Needs a fused optimizer, which skips a bad update
    on the device; refusals are reported up to this many steps late, with their right step number. Only what is not finite
    is refused in time, a gradient norm that overflows included: a step that a guard would skip for another reason stays
    applied and is reported as an incident (a rollback or a stop still happens, late). After a refusal the steps up to the
    next read use the learning rate of one step further on."""


HEAL = ("samples", "island", "patch", "hold")
LADDER = (
    *("retry", "samples", "micro_batch", "island", "patch", "replicas", "hold"),
    *("skip", "reinitialise", "rollback", "disk", "restart"),
)


@dataclass
class RecoveryConfig:
    heal: list[str] = option(factory=lambda: ["samples", "island", "hold"], choices=HEAL)  # noqa: RUF009
    """What may change the computation to repair a step: `samples` (leave out the bad ones), `island` (keep the overflowing
    module in float32 from then on), `patch` (run the safe variant of the operation at the blamed line from then on),
    `hold` (what would become non-finite in step after step stays as it is: the learning rate of a schedule that gives NaN, a few
    parameters whose gradient is not finite, entries of a buffer; an `eps` that is zero in half precision is raised). `[]`: a
    refused step is only ever skipped, rolled back or stopped at."""
    ladder: list[str] = option(factory=lambda: list(LADDER))  # noqa: RUF009
    """The rungs, in the order in which they are tried after a refusal; a stop always comes last. A rung of your own is
    given as `package.module.Class` or `./file.py:Class`."""
    budget_steps: int | None = option(10_000, ge=1)
    """Refusals, retries, healed steps and rollbacks are counted over the last N steps, so that rare trouble does not add up
    to the end of a long run; null: over the whole run. What lasts (islands, patches, restarts) always is."""
    max_refusals: int = option(100, ge=0)
    """Refused steps within `budget_steps` after which the run stops. A bad update is never accepted instead."""
    max_bad_share: float | None = option(0.03, gt=0.0, lt=1.0)
    """When more than this share of the samples of the last 100 steps were bad (or half of the steps, where the samples at fault are
    not known), the run stops and says what they have in common: repairs must not become the rule. It also stops when all of the first
    8 steps are bad, or when at the first bad step some of the data that is read ahead shows that much of it is like that. null: repair and
    skip for as long as the other budgets last."""
    max_retries: int = option(50, ge=0)
    """Steps that may be run once more within `budget_steps`, because their fault may be transient."""
    max_healed: int = option(10_000, ge=0)
    """Steps that may be trained on without their bad samples or micro-batches within `budget_steps`."""
    quarantine_after: int | None = option(2, ge=1)
    """Incidents of the same sample after which it is left out of later epochs; null: never. Only for data given as a Dataset,
    and where `heal` has `samples`. Listed in `quarantine.jsonl`."""
    max_islands: int = option(8, ge=0)
    """fp32 islands that may be grown in the whole run."""
    max_patches: int = option(8, ge=0)
    """Operations that may be replaced by their safe variant in the whole run."""
    max_held: int = option(8, ge=0)
    """Times in the whole run that something may be held as it is."""
    max_rollbacks: int = option(20, ge=0)
    """Rollbacks within `budget_steps`."""
    max_restarts: int = option(2, ge=0)
    """Restarts from the beginning at a lower learning rate in the whole run."""


@dataclass
class ForensicsConfig:
    enabled: bool = True
    """Replay a step that was refused for a non-finite number, and find its first bad operation, cause and guilty samples."""
    remedies: bool = True
    """Also try remedies on the replay, once per place in the source; costs a few dozen steps' time."""
    max_seconds: float = option(120.0, gt=0.0)
    """An investigation begins no further replay after this time, and says what it has. The operation and its cause are found in any case,
    for about three replays; half of the time is for the samples, the rest for lineage and remedies."""
    max_bundle_mb: float = option(200.0, ge=0.0)
    """Weights larger than this are not kept with an incident; its replay then needs a checkpoint."""
    max_incidents: int = option(20, ge=0)
    """Incidents written with their batch and random state, so that they can be replayed; later ones keep their numbers only."""


@dataclass
class CheckpointConfig:
    enabled: bool = True
    """Save the whole training state: when the run starts and ends, when it is interrupted, and as often as set below. Without it
    only the final weights are written and the run cannot be resumed."""
    every_steps: int | None = option(500, ge=1)
    """Save every N committed steps; null: not by steps."""
    every_minutes: float | None = option(None, gt=0.0)
    """Save when N minutes have passed since the last time; null: not by time."""
    keep_last: int = option(3, ge=1)
    """The newest checkpoints to keep."""
    keep_best: int = option(1, ge=0)
    """In addition, the best by `loop.monitor`; a new best evaluation is saved at once. 0: none."""
    keep_every: int | None = option(None, ge=1)
    """In addition, one for every N committed steps, never deleted."""
    async_: bool = False
    """Copy the state, then write it in a thread while training goes on. Costs the memory of one more copy; an error while
    writing is known at a later step."""
    on_error: str = option("warn", choices=("warn", "stop"))
    """When a checkpoint cannot be written (full disk, say): `warn` and train on, or `stop`. The last one of a run must be
    written in any case. Checkpoints that exist are never touched before a new one is complete."""
    save_final: bool = True
    """Write the final weights to `checkpoints/final.safetensors`, after checking that they are finite."""
    snapshot_every: int | None = option(50, ge=1)
    """Copy the training state to memory every N committed steps, to roll back to; null: never."""
    snapshots: int = option(3, ge=1)
    """Copies kept, not counting the very first one; fewer if they would fill the machine's memory."""
    save_snapshots: bool = True
    """Write those copies next to a checkpoint, so that a resumed run can go back to where the uninterrupted one could. Each is written once
    and takes the room of a checkpoint; only those of the newest checkpoint are kept. One process only."""
    trust_after: int = option(20, ge=0)
    """Committed steps without a refusal after which a copy is known to be good, and may be rolled back to."""


@dataclass
class LoggingConfig:
    console: str = option("auto", choices=("auto", "plain", "incidents", "json", "off"))
    """What is printed: `auto` draws live progress on a terminal and plain lines elsewhere, `incidents` leaves the lines about
    healthy steps out (as `safetrain.watch` does unless told otherwise), `json` prints the journal's lines."""
    tensorboard: bool = True
    """Write TensorBoard events into the run directory."""
    histograms_every: int | None = option(None, ge=1)
    """Write histograms of the weights and gradients of each layer to TensorBoard every N steps: of their finite values,
    with how many are not. Takes about 10 ms for a million values; null: never."""
    trackers: list[str] = option(factory=list, choices=("wandb", "mlflow", "trackio", "aim"))  # noqa: RUF009
    """Trackers that log the same as TensorBoard. Each must be installed, and is set up by its own environment variables."""
    project: str | None = None
    """Name of the project or experiment in those trackers; without it, `name`."""
    sinks: list[Target] = field(default_factory=list, metadata=target())
    """Sinks of your own, a `_target_` each: subclasses of `safetrain.telemetry.Sink`, which receive everything that is logged."""


PROGRESS_GUARDS = ("spike", "rollback", "stall")
"""Guards that judge finite steps by how the loss goes."""


@dataclass
class Config:
    name: str = "run"
    """Name of the run; new run directories start with it. A config file without a name gets the file's."""
    seed: int | None = option(None, ge=0)
    """Seed of Python, NumPy and torch, set before the model is built. Without it the random state is left as it is."""
    monitor_progress: bool = True
    """Whether the loss shows how training goes. `false` for losses that need not fall (adversarial, policy gradients): the guards `spike`,
    `rollback` and `stall` are then off. Without this setting, what they suspect is tried, and they soon leave such runs alone."""
    trainer: Target | None = field(default=None, metadata=target(takes_arguments=False))
    """The `_target_` of a `SafeTrainer` subclass; without it `SafeTrainer` itself."""
    model: Target | None = field(default=None, metadata=target())
    """The `_target_` of the model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Where the samples come from."""
    loss: Target | None = field(default=None, metadata=target(num_injected=2))
    """The `_target_` of `loss(model, batch)`, a function or a class; or of a `loss(input, target)` like
    `torch.nn.CrossEntropyLoss`, for batches of (inputs, targets)."""
    optimizer: Target = field(
        default_factory=lambda: {"_target_": "torch.optim.AdamW", "lr": 1e-3}, metadata=target(num_injected=1)
    )
    """The `_target_` of the optimizer; it is given the trainable parameters. One of `torch.optim` is fused where torch has such a
    kernel, unless `fused` or `foreach` is given."""
    scheduler: Target | None = field(default=None, metadata=target(num_injected=1, own={"every": ("step", "epoch")}))
    """The `_target_` of a learning-rate scheduler; it is given the optimizer. `every: step` (the default) steps it once per committed
    step, `every: epoch` at the end of each epoch: its T_max, step_size or milestones then count epochs."""
    loop: LoopConfig = field(default_factory=LoopConfig)
    """How long to train, and how."""
    guards: dict[str, Any] = field(default_factory=dict)
    """Options of each guard by name; `null` turns one off, `_target_` adds one of your own."""
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    """What may be done after a refusal, and how often."""
    forensics: ForensicsConfig = field(default_factory=ForensicsConfig)
    """What is kept of an incident."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is saved, to disk and in memory."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What is shown."""

    @property
    def active_guards(self) -> dict[str, Any]:
        """`guards` without those that are turned off."""
        off = () if self.monitor_progress else PROGRESS_GUARDS
        return {name: options for name, options in self.guards.items() if options is not None and name not in off}
