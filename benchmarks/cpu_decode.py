"""CPU speed of termgen beside transformers and llama.cpp: same machine, same run, same weights.

    python benchmarks/cpu_decode.py [--model NAME_OR_GGUF] [--output-json FILE]

Measures decode tokens/s at batch 1 and 8 and the time a 256-token prompt takes to its first token.
The contestants take turns, round after round (A-B-C-A-B-C), each in a process of its own that
sleeps while another one works, so that a change in the machine's mood hits all of them. Decode
speed is the time of n+1 tokens less the time of one token, for all alike. transformers reads the
same GGUF file, dequantised to float32; llama.cpp gets its weights quantised again to Q8_0.

A contestant whose packages are missing is left out with a line that says so. With --without avx512
(or amx, avx512vnni, ...) termgen and torch run as on a processor that lacks it.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine_facts, parser_of, print_rows, write_report

from termgen.library.catalog import resolve_model

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

SAME = ("termgen float32", "transformers float32")
"""The two that do the same arithmetic; rounds with equal tokens are counted."""
ID_RANGE = (1000, 20_000)  # plain words in any vocabulary
MEASURES = {  # (batch size, prompt tokens, decoded tokens)
    "decode, batch 1, tokens/s": (1, 16, 48),
    "decode, batch 8, tokens/s": (MAX_BATCH, 16, 48),
    "256-token prompt, s": (1, 256, 0),
}


def hide_features(without: Sequence[str]) -> None:
    """Have kernels compiled as on a processor without the features whose names begin so."""
    from termgen.engine.device.native import jit

    own = jit.this_processor()
    features = [
        f"-{feature[1:]}" if feature[1:].startswith(tuple(without)) else feature
        for feature in own.features.split(",")
    ]
    lesser = jit.Processor(own.name, ",".join(features))
    jit.this_processor = lambda: lesser  # type: ignore[assignment]


def serve(name: str, model: Path, threads: int, without: Sequence[str], pipe: Connection) -> None:
    """Answer (prompts, number of tokens) with (seconds, token ids) until the pipe ends."""
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    start = time.perf_counter()
    if without:
        hide_features(without)
    try:
        generate = CONTESTANTS[name](model, threads)
    except Missing as error:
        pipe.send(str(error))
        return
    pipe.send(time.perf_counter() - start)
    while (command := pipe.recv()) is not None:
        start = time.perf_counter()
        token_ids = generate(*command)
        pipe.send((time.perf_counter() - start, token_ids))


class Contestant:
    """One engine in its process."""

    def __init__(self, name: str, model: Path, threads: int, without: Sequence[str]) -> None:
        self.name = name
        spawn = multiprocessing.get_context("spawn")
        self._pipe, pipe = spawn.Pipe()
        self._process = spawn.Process(
            target=serve, args=(name, model, threads, without, pipe), daemon=True
        )
        self._process.start()
        pipe.close()

    def started(self) -> float | str:
        """Seconds of loading, or why it cannot run."""
        try:
            return self._pipe.recv()
        except EOFError:
            return "its process ended"

    def generate(self, prompts: Prompts, num_tokens: int) -> tuple[float, Prompts]:
        self._pipe.send((prompts, num_tokens))
        seconds, token_ids = self._pipe.recv()
        return seconds, token_ids

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(20.0)


def run_once(contestant: Contestant, prompts: Prompts, decoded: int) -> tuple[float, Prompts]:
    """Tokens/s after the first token, or for `decoded` = 0 seconds to it; and the tokens."""
    first_s, tokens = contestant.generate(prompts, 1)
    if not decoded:
        return first_s, tokens
    all_s, tokens = contestant.generate(prompts, 1 + decoded)
    return len(prompts) * decoded / (all_s - first_s), tokens


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="catalog name or .gguf file (default: smollm2-135m)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, help="leave out the others")
    parser.add_argument("--without", nargs="+", default=(), help="features of the processor")
    args = parser.parse_args()
    local = resolve_model(args.model)
    if local.kind != "gguf":
        parser.error(f"{local.path} is not a GGUF file, which every contestant can read")
    facts = machine_facts()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    if any("avx512".startswith(feature) for feature in args.without):
        os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    elif "amx" in args.without:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_VNNI"
    contestants = []
    for name in args.only or CONTESTANTS:  # loaded one after another
        contestant = Contestant(name, local.path, args.threads, args.without)
        if isinstance(loaded := contestant.started(), str):
            print(f"{name}: left out, {loaded}", file=sys.stderr)
        else:
            print(f"{name}: loaded in {loaded:.1f} s", file=sys.stderr)
            contestants.append(contestant)
    rng = np.random.default_rng(0)
    for contestant in contestants:  # warm up: allocators, thread pools, page cache
        contestant.generate(rng.integers(*ID_RANGE, (MAX_BATCH, 32)).tolist(), 4)
    values: dict[tuple[str, str], list[float]] = defaultdict(list)
    num_equal: dict[str, int] = dict.fromkeys(MEASURES, 0)
    for index in range(args.rounds):
        for measure, (batch, prompt, decoded) in MEASURES.items():
            prompts = rng.integers(*ID_RANGE, (batch, prompt)).tolist()
            tokens = {}
            for contestant in contestants:
                value, tokens[contestant.name] = run_once(contestant, prompts, decoded)
                values[measure, contestant.name].append(value)
            num_equal[measure] += tokens.get(SAME[0], 0) == tokens.get(SAME[1], 1)
        print(f"round {index + 1} of {args.rounds} done", file=sys.stderr)
    for contestant in contestants:
        contestant.close()
    results: list[dict[str, Any]] = []
    for (measure, name), found in values.items():
        middle = statistics.median(found)
        results.append({"measure": measure, "contestant": name, "median": middle, "values": found})
    print_rows({name: row[name] for name in ("measure", "contestant", "median")} for row in results)
    if {*SAME} <= {contestant.name for contestant in contestants}:
        print(f"rounds in which {' and '.join(SAME)} gave the same tokens: {[*num_equal.values()]}")
    write_report(args, {"values": results, "rounds_with_equal_tokens": num_equal}, facts)


if __name__ == "__main__":
    main()
