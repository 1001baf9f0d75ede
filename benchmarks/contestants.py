"""The engines that `cpu_decode.py` compares.

Each is made from a GGUF file and a number of threads, in a process of its own. It generates exactly
as many greedy tokens for every prompt as it is asked for, and never reuses an earlier prompt.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MAX_LENGTH = 512
MAX_BATCH = 8

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Prompts]


class Missing(Exception):
    """A contestant cannot run here, and why."""


def termgen_engine(model: Path, threads: int, quantization: str) -> Generate:
    from termgen import LLM, SamplingParams

    llm = LLM(
        model,
        device="cpu",
        dtype="float32",
        quantization=quantization,
        threads=threads,
        max_model_len=MAX_LENGTH,
        max_num_seqs=MAX_BATCH,
        max_num_batched_tokens=MAX_LENGTH,
        kv_cache_gib=0.5,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]

    return generate


def transformers_model(model: Path, threads: int) -> Generate:
    need("transformers", "accelerate", "gguf")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    lm: Any = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    )
    lm.eval()
    lm.generation_config.eos_token_id = None
    lm.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        ids = torch.tensor(prompts)
        output = lm.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
        )
        new: Prompts = output[:, ids.shape[1] :].tolist()
        return new

    return generate


def llama_cpp(model: Path, threads: int) -> Generate:
    need("xllamacpp", "gguf")
    import xllamacpp

    with tempfile.TemporaryDirectory() as folder:
        params = xllamacpp.CommonParams()
        params.model.path = str(write_q8_0(model, Path(folder) / "q8_0.gguf"))
        params.n_ctx = MAX_LENGTH * MAX_BATCH
        params.n_parallel = MAX_BATCH
        params.n_gpu_layers = 0
        params.cpuparams.n_threads = threads
        params.cpuparams_batch.n_threads = threads
        server = xllamacpp.Server(params)  # the file has been read when this returns

    def complete(prompt: list[int], num_tokens: int) -> int:
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": num_tokens,
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                "return_tokens": True,
                "stream": False,
            }
        )
        return int(answer["usage"]["completion_tokens"])

    def generate(prompts: Prompts, num_tokens: int) -> Prompts:
        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(complete, prompts, [num_tokens] * len(prompts)))
        assert counts == [num_tokens] * len(prompts), counts
        return []  # its weights differ, so its tokens are not comparable

    return generate


def write_q8_0(source: Path, target: Path) -> Path:
    """The same model with every matrix dequantised and quantised again as Q8_0."""
    import gguf
    from gguf import GGMLQuantizationType, GGUFValueType

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value = field.contents()
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_Q8_0)
        sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 2:
            quantized = gguf.quants.quantize(values, GGMLQuantizationType.Q8_0)
            writer.add_tensor(tensor.name, quantized, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Missing(f"not installed: pip install {' '.join(missing)}")


CONTESTANTS: dict[str, Callable[[Path, int], Generate]] = {
    "termgen float32": lambda model, threads: termgen_engine(model, threads, "none"),
    "termgen int8": lambda model, threads: termgen_engine(model, threads, "int8"),
    "transformers float32": transformers_model,
    "llama.cpp Q8_0": llama_cpp,
}
