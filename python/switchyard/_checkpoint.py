"""Made-up checkpoints."""

from ctypes import byref

from ._layer_arguments import path_of
from ._native import initialised, native
from ._structs import CheckpointRecipe
from ._tensors import dtype_code


def make_checkpoint(directory, family, hidden, inner, num_experts, top_k, shared_experts=0,
                    groups=1, top_groups=1, num_layers=1, dtype="bf16", seed=0, shards=1):
    """Write a small checkpoint of a family with made-up weights; same bytes on every machine."""
    recipe = initialised(CheckpointRecipe, "checkpoint_recipe")
    recipe.family = path_of("family", family)
    recipe.hidden = hidden
    recipe.inner = inner
    recipe.num_experts = num_experts
    recipe.top_k = top_k
    recipe.shared_experts = shared_experts
    recipe.groups = groups
    recipe.top_groups = top_groups
    recipe.num_layers = num_layers
    recipe.dtype = dtype_code("dtype", dtype)
    recipe.seed = seed
    recipe.shards = shards
    native.make_checkpoint(byref(recipe), path_of("directory", directory))
