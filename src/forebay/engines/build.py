"""From a run file's ``[engine]`` table to engines; importing it loads no torch."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from forebay.config import Component, ConfigError, StrictModel, check_arguments, errors_about, look_up
from forebay.engines.base import DEFAULT_MAX_BATCH, Engine, EngineLost, EngineSurroundings, numbered
from forebay.engines.servers.build import HTTPArguments, http_engines
from forebay.models import DEVICE_PATTERN, attention_choices, find_device, load_model
from forebay.models.config import PrecisionKey


class EngineConfig(Component):
    """The run file's ``[engine]`` table.

    >>> EngineConfig.model_validate("vllm").dtype
    'auto'
    """

    name: str = "transformers"
    dtype: PrecisionKey = "auto"
    """In which engines hold the weights and compute: ``float32``, ``bfloat16``, or ``auto``, which is
    bfloat16 on a CUDA device. On a CPU bfloat16 halves the memory and is several times slower. The trainer's
    weights stay float32 and are cast once (``train.dtype`` is for its passes)."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """The kernel of attention of the engines ``transformers`` and ``process``: ``sdpa`` or ``eager``, since
    their requests lie side by side, with a mask. Servers choose their own."""


class TransformersArguments(StrictModel, strict=True):
    """Arguments of the engine ``transformers``."""

    max_batch: int = Field(default=DEFAULT_MAX_BATCH, ge=1)
    """Requests that decode together; the rest wait."""
    prefill_tokens: int = Field(default=8192, ge=1)
    """Tokens, padding included, that one pass over prompts may hold; a longer prompt goes alone."""
    cache_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens for which the key/value cache may hold memory: requests times the longest of them, which
    ``max_batch`` bounds as well. The rest wait in turn; when responses outgrow it, the youngest wait again,
    with their tokens. ``auto``: 0.6 of the free memory of a CUDA device, else no bound."""
    cuda_graphs: bool = True
    """On a CUDA device, record the forward passes of decoding and repeat them; false saves their memory."""
    takes_adapters: bool = True
    """With LoRA, keep a second copy of the adapted weights and take adapters alone; false: be given merged
    weights."""
    device: str | None = Field(default=None, pattern=DEVICE_PATTERN)
    """Where the model computes: ``cpu``, ``cuda``, ``cuda:1``. None: the run's ``device``."""


class ProcessArguments(StrictModel, strict=True):
    """Arguments of the engine ``process``, besides those of the engine inside."""

    engines: int = Field(default=1, ge=1)
    """Processes on this machine, each with an engine of its own."""
    engine: str = "transformers"
    """The engine in each of them, by its name."""
    threads: int = Field(default=1, ge=1)
    """CPU threads for torch in each."""


def _transformers(surroundings: EngineSurroundings, *, device: str | None = None, **arguments: Any) -> list[Engine]:
    from transformers import AutoConfig

    from forebay.engines.local.transformers import TransformersEngine

    place = find_device(device or surroundings.device)
    attention, *_ = attention_choices(
        surroundings.attention,
        AutoConfig.from_pretrained(surroundings.model_folder),
        device=place,
        precision=surroundings.dtype,
        key="engine.attention",
    )
    return [
        TransformersEngine(
            load_model(surroundings.model_folder, dtype=surroundings.dtype, attention=attention),
            surroundings.tokenizer,
            max_context_tokens=surroundings.model.max_context,
            device=str(place),
            **arguments,
        )
    ]


def _processes(surroundings: EngineSurroundings, **arguments: Any) -> list[Engine]:
    """Processes on this machine, as `ProcessArguments`; their engines take the other arguments."""
    from forebay.engines.process.engine import ProcessEngine
    from forebay.engines.process.host import EngineRecipe
    from forebay.engines.weights.between_processes import SharedMemoryHandOver

    own = {name: arguments.pop(name) for name in ProcessArguments.model_fields if name in arguments}
    settings = ProcessArguments(**own)
    recipe = EngineRecipe(
        model_folder=surroundings.model_folder,
        model=surroundings.model,
        dtype=surroundings.dtype,
        attention=surroundings.attention,
        engine=Component(name=settings.engine, arguments=arguments),
        threads=settings.threads,
    )
    hand_over, logs = SharedMemoryHandOver(), surroundings.scratch
    started: list[ProcessEngine] = []

    def make(number: int) -> ProcessEngine:
        gpus = surroundings.seat(number).gpus
        device = f"cuda:{gpus[0]}" if gpus else str(find_device(surroundings.device))
        log = logs / f"engine_{number}.log"
        made = ProcessEngine(recipe.model_copy(update={"device": device}), hand_over, log=log)
        started.append(made)
        # One that joins a run says so itself only when it is up.
        made.max_context_tokens, made.takes_adapters = (started[0].max_context_tokens, started[0].takes_adapters)
        return made

    engines = numbered(settings.engines, make)
    try:
        for process in started:
            process.wait_until_ready()
    except EngineLost as error:
        # All of them: the others would go on loading models for a run that does not start.
        for process in started:
            process.kill()
        raise ConfigError(f"engine 'process': {error}") from None
    return engines


ENGINES: dict[str, tuple[Callable[..., list[Engine]], type[StrictModel]]] = {
    "process": (_processes, ProcessArguments),
    "sglang": (partial(http_engines, "sglang"), HTTPArguments),
    "transformers": (_transformers, TransformersArguments),
    "vllm": (partial(http_engines, "vllm"), HTTPArguments),
}
"""Values of ``engine.name``, what makes such engines, and its arguments; besides, ``package.module:function``."""

ENGINE_ARGUMENTS = {name: arguments for name, (_, arguments) in ENGINES.items()}


def find_engine(config: Component) -> Callable[..., list[Engine]]:
    """The function that makes the engines of `config`; nothing is made.

    Raises:
        ConfigError: the name is unknown, or an argument is unknown, missing or of a wrong value.
    """
    factories = {name: factory for name, (factory, _) in ENGINES.items()}
    factory: Callable[..., list[Engine]] = look_up("engine", config.name, factories)
    name, arguments = config.name, config.arguments
    # One that is not named here is called with the surroundings first, by whatever name it has for them.
    model: Any = ENGINE_ARGUMENTS.get(name) or partial(factory, None)
    if model is ProcessArguments:
        inside = ENGINE_ARGUMENTS.get(arguments.get("engine", "transformers"))
        if inside is None:
            # The other arguments are those of an engine that is not known here.
            arguments = {key: value for key, value in arguments.items() if key in model.model_fields}
        elif inside is not model:
            # One model, so that a misspelled argument is compared with those of both.
            model = create_model(name, __base__=(model, inside))
    check_arguments("engine", name, model, arguments)
    attention = getattr(config, "attention", "auto")
    if name in ("sglang", "vllm") and attention != "auto":
        raise ConfigError(f"engine.attention = {attention!r}: engine {name!r} chooses its own kernel; leave it out")
    return factory


def build_engines(config: Component, surroundings: EngineSurroundings) -> list[Engine]:
    """The engines that `config` describes.

    Raises:
        ConfigError: the name is unknown, an argument does not fit, or the engine cannot run the model.
    """
    factory = find_engine(config)
    with errors_about(f"engine {config.name!r}", TypeError, ValueError):
        return list(factory(surroundings, **config.arguments))
