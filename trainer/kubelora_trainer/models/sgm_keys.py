"""Layer names of SDXL in its original code (sgm) and in kohya's LoRA files.

diffusers numbers blocks by resolution and keeps resnets, attentions and samplers in separate lists.
sgm numbers every resnet (with the attention after it) and every sampler in one sequence. The
mapping follows from the UNet's configuration alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Part = Literal["unet", "text_encoder", "text_encoder_2"]
SGM_PARTS: tuple[Part, ...] = ("unet", "text_encoder", "text_encoder_2")
KOHYA_PREFIX: dict[Part, str] = {
    "unet": "lora_unet",
    "text_encoder": "lora_te1",
    "text_encoder_2": "lora_te2",
}
IN_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
OUTSIDE_BLOCKS = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}


def sgm_blocks(config: Mapping[str, Any]) -> dict[str, str]:
    """Map every resnet, attention and sampler of a UNet from diffusers' name to sgm's.

    config: of a UNet2DConditionModel; ``down_block_types``, ``up_block_types`` and
    ``layers_per_block`` (n) are read. A level on the way down has n pairs (resnet, attention) and,
    except for the last level, a downsampler: from ``input_blocks.1`` on, after conv_in. A level on
    the way up has n + 1 pairs, with the upsampler after the last of them.
    """
    layers = int(config["layers_per_block"])
    names = {
        "mid_block.resnets.0": "middle_block.0",
        "mid_block.attentions.0": "middle_block.1",
        "mid_block.resnets.1": "middle_block.2",
    }
    position = 1
    for level, kind in enumerate(config["down_block_types"]):
        for layer in range(layers):
            names[f"down_blocks.{level}.resnets.{layer}"] = f"input_blocks.{position}.0"
            if "CrossAttn" in kind:
                names[f"down_blocks.{level}.attentions.{layer}"] = f"input_blocks.{position}.1"
            position += 1
        if level < len(config["down_block_types"]) - 1:
            names[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{position}.0.op"
            position += 1
    position = 0
    for level, kind in enumerate(config["up_block_types"]):
        attends = "CrossAttn" in kind
        for layer in range(layers + 1):
            names[f"up_blocks.{level}.resnets.{layer}"] = f"output_blocks.{position}.0"
            if attends:
                names[f"up_blocks.{level}.attentions.{layer}"] = f"output_blocks.{position}.1"
            position += 1
        if level < len(config["up_block_types"]) - 1:
            last = f"output_blocks.{position - 1}.{2 if attends else 1}"
            names[f"up_blocks.{level}.upsamplers.0.conv"] = f"{last}.conv"
    return names


def sgm_name(name: str, blocks: Mapping[str, str]) -> str:
    """Convert the name of a UNet layer to sgm's. blocks: from ``sgm_blocks``.

    Raises KeyError for a name that SDXL's UNet does not have.
    """
    if name in OUTSIDE_BLOCKS:
        return OUTSIDE_BLOCKS[name]
    if name in blocks:
        return blocks[name]
    parts = name.split(".")
    depth = 3 if parts[0] == "mid_block" else 4
    block, inside = blocks[".".join(parts[:depth])], parts[depth:]
    if parts[depth - 2] == "resnets":
        return ".".join([block, IN_RESNET[inside[0]], *inside[1:]])
    return ".".join([block, *inside])


def kohya_names(
    config: Mapping[str, Any], layers: Iterable[tuple[Part, str]]
) -> dict[tuple[Part, str], str]:
    """Map layers to the stem of their kohya keys, such as ``lora_unet_middle_block_1_proj_in``.

    config: the UNet's. layers: (part, name in diffusers or transformers). Text encoders keep
    ``text_model``, which newer versions of transformers omit.
    """
    blocks = sgm_blocks(config)

    def stem(part: Part, name: str) -> str:
        original = (
            sgm_name(name, blocks)
            if part == "unet"
            else f"text_model.{name.removeprefix('text_model.')}"
        )
        return f"{KOHYA_PREFIX[part]}_{original.replace('.', '_')}"

    return {(part, name): stem(part, name) for part, name in layers}
