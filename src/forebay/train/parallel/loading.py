"""A model over several ranks, from its folder: FSDP2 and tensor parallelism over a mesh of torch's.

::

    num_ranks --make_mesh--> replica x shard x tensor
    folder --load_sharded--> sizes alone (meta device) --> the model's plan for tensor parallelism, FSDP2
                             --> each rank reads its slices of the files: the whole model is nowhere
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forebay.config import ConfigError, import_object
from forebay.models.config import Precision
from forebay.models.loading import auto_class
from forebay.train.model.layers import decoder_layers
from forebay.train.parallel.config import ParallelConfig
from forebay.train.parallel.context import Context
from forebay.train.parallel.sharding import CONTEXT, REPLICA, SHARD, TENSOR, no_progress_bars


def make_mesh(device_type: str, num_ranks: int, config: ParallelConfig) -> DeviceMesh:
    """The ranks in three dimensions; neighbors by number, as on one machine, differ in the last ones.

    Raises:
        ConfigError: there are not so many ranks.
    """
    config.check(num_ranks)
    sizes = (config.replicas, num_ranks // config.replicas // config.num_tensor, config.num_tensor)
    return init_device_mesh(device_type, sizes, mesh_dim_names=(REPLICA, SHARD, TENSOR))


def make_context(device_type: str, num_ranks: int, config: ParallelConfig) -> Context | None:
    """This rank's context group, of neighboring slices: FSDP adds up its gradients as of any other ranks."""
    if config.context == 1:
        return None
    sizes = (num_ranks // config.same_sequences, config.context, config.num_tensor)
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=("sequences", CONTEXT, TENSOR))
    return Context(mesh.get_group(CONTEXT), config.context)


def load_sharded(
    source: Mapping[str, Any], mesh: DeviceMesh | None, config: ParallelConfig, *, precision: Precision, device: str
) -> Any:
    """The model that `source` describes (`forebay.train.parallel.learner`), a slice of it on every rank of `mesh`.

    Without a mesh it is whole, in the CPU's memory, for the one rank.

    transformers makes the model without content, asks this for its slices, and then reads these alone from
    the files, whatever names the files have for them.

    Passes are in `precision`; slices have the dtype of the source, if it names one, else that of the passes.
    Gradients are summed over ranks, and not averaged, because token weights are already of the whole
    mini-batch.

    Raises:
        ConfigError: the model has no plan for tensor parallelism, or the plan does not fit it.
    """
    from transformers.distributed import DistributedConfig

    model_class: Any = _find(source["class"], source["folder"])
    if mesh is not None:
        model_class = _sharded_class(model_class, mesh, config, precision=precision, device=device)
    with no_progress_bars():
        model = model_class.from_pretrained(
            source["folder"],
            dtype=getattr(torch, source["dtype"] or precision),
            attn_implementation=source["attention"],
            local_files_only=True,
            **({} if mesh is None else {"distributed_config": DistributedConfig()}),
        )
    # It would be written into every config.json.
    vars(model.config).pop("distributed_config", None)
    # The folder of an object that was saved for this will be gone. Its own may have a processor of images.
    model.name_or_path = source["name"]
    for name in source["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    return model


def _sharded_class(base: Any, mesh: DeviceMesh, config: ParallelConfig, *, precision: Precision, device: str) -> Any:
    """A class of models like `base` whose loader reads the slices of `mesh` that are this rank's."""

    def prepare(_cls: Any, /, distributed: Any, **_: Any) -> tuple[Any, dict[str, str], Any]:
        # The loader asks the last one for the mesh.
        return distributed, {"": "cpu" if config.offload else device}, SimpleNamespace(get_mesh=lambda _: mesh)

    def distribute(_cls: Any, /, model: Any, distributed: Any, _: Any) -> Any:
        # FSDP must know which weights are one; the loader ties them last.
        model.tie_weights()
        if config.num_tensor > 1:
            _split_matrices(model, mesh)
        elif config.tensor == "experts":
            _share_out_experts(model, mesh)
        _shard(model, mesh, config, precision)
        return model

    # The two steps of its loader that transformers leaves to the model's class.
    own: dict[str, Any] = {
        "prepare_distribute_model": classmethod(prepare),
        "maybe_distribute_model": classmethod(distribute),
        "__module__": base.__module__,
    }
    return type(base.__name__, (base,), own)


def _find(name: str | None, folder: str) -> type[nn.Module]:
    """The class ``module:Name`` of a model, or the causal language model of a folder."""
    if name is not None:
        return import_object("model", name)  # type: ignore[no-any-return]
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return auto_class(config)._model_mapping[type(config)]  # type: ignore[no-any-return]


def _split_matrices(model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism of the layers, by the plan that transformers has for the model.

    Embeddings and output head stay whole within a tensor group: they are most of the communication, and the
    head is applied in chunks (`forebay.train.model.head`).
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    kind, size = model.config.model_type, mesh[TENSOR].size()
    plan = {name: style for name, style in model.tp_plan.items() if "layers." in name}
    if not plan:
        raise ConfigError(
            f"train.parallel.tensor = {size}: transformers has no plan for the matrices of models of type "
            f"{kind!r}; set it to 1 and use more ranks"
        )
    text = model.config.get_text_config()
    heads = (text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    if any(number % size for number in heads):
        raise ConfigError(
            f"train.parallel.tensor = {size} does not divide the {heads[0]} heads and {heads[1]} key/value "
            f"heads of this model; set it to a divisor of both"
        )
    apply_tensor_parallelism(model, mesh[TENSOR], model._expand_parallel_plan(plan))


def _share_out_experts(model: Any, mesh: DeviceMesh) -> None:
    """Whole experts on each rank of a copy of the slices, by transformers' plan: tokens go there and back."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    text, size = model.config.get_text_config(), mesh[SHARD].size()
    count = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None) or 0
    if not model.ep_plan or count % size:
        raise ConfigError(
            f"train.parallel.tensor = 'experts' wants a model that transformers has a plan for, with experts "
            f"that {size} ranks divide, not {count} of type {model.config.model_type!r}: set it to 1"
        )
    plan = model._expand_parallel_plan(model.ep_plan)
    apply_expert_parallelism(model, mesh[SHARD], mesh[TENSOR], plan)


def _shard(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, precision: Precision) -> None:
    """FSDP2 over every layer, and over the rest of the model as one more."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    on_gpu = mesh.device_type == "cuda"
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policies: dict[str, Any] = {
        "mp_policy": mixed if precision != "float32" else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if config.offload else OffloadPolicy(),
    }
    slices = mesh[REPLICA, SHARD] if config.replicas > 1 else mesh[SHARD]
    experts = [part for part in model.modules() if getattr(part, "_is_expert_parallel", False)]
    for module in (*experts, *decoder_layers(model), model):
        # All tokens of its experts come to a rank: the slices of these are over the copies alone.
        over = mesh[REPLICA] if module in experts else slices
        # So is the rest: whole weights that stay behind a pass without gradient would be stale after the next
        # optimizer step.
        sharded: Any = fully_shard(module, mesh=over, reshard_after_forward=True, **policies)
        # With a factor alone torch asks for a premultiplied sum, which gloo lacks.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
