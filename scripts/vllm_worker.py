"""vLLM behind standard input and output: what `engine=vllm` starts, in vLLM's own environment.

Nobody calls this by hand: grpo_jax/engine/ does, with the interpreter `engine.python`. It needs
vLLM and the standard library, nothing of this project. A request is a line of JSON, and so is the
answer to it:

    {"id": 1, "call": "start", "arguments": {"folder": F, "dtype": "float32", "context": 66,
                                             "options": {}}}
    {"id": 1, "result": {"engine": "vllm 0.32.0"}}
    {"id": 2, "call": "load", "arguments": {"folder": F}}            new weights
    {"id": 2, "result": null}
    {"id": 3, "call": "sample", "arguments": {"prompts": [[5, 9]], "seeds": [1, 2],
        "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [0]}}
    {"id": 3, "result": [{"tokens": [7, 0], "logp": [-0.7, -0.1], "finish": "stop"}, ...]}

or {"id": 3, "error": "what went wrong"}. `seeds` has one number a row: len(seeds) / len(prompts)
answers to each prompt, prompt-major. All tokens are ids; `logp` is in nats, of the distribution
that was drawn from. What vLLM and its libraries print goes to standard error. The end of the input
ends the process at once, in the middle of a call too: whoever asked is gone.
"""

import importlib
import json
import os
import queue
import signal
import sys
import threading
from typing import Any


def start(folder: str, dtype: str, context: int, options: dict[str, Any]) -> Any:
    """The engine, with the weights and config.json of `folder`. `context`: tokens of the longest
    prompt and answer together. `options` go to vllm.LLM as they are."""
    return importlib.import_module("vllm").LLM(
        model=folder,
        max_model_len=context,
        skip_tokenizer_init=True,  # ids in and out: the folder has no tokenizer
        generation_config="vllm",  # no sampling settings but those of a call
        logprobs_mode="processed_logprobs",  # behind temperature, top_k and top_p, not before them
        **{"dtype": dtype} | options,
    )


def load(engine: Any, folder: str) -> None:
    """Take the weights in `folder`; what is cached of the old ones goes."""
    engine.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    if not engine.reset_prefix_cache():
        raise RuntimeError("the cache of prefixes is in use: it would answer with old weights")


def sample(
    engine: Any,
    prompts: list[list[int]],
    seeds: list[int],
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    stop: list[int],
) -> list[dict[str, Any]]:
    """One answer a seed, in that order."""
    parameters = importlib.import_module("vllm").SamplingParams
    each = len(seeds) // len(prompts)
    settings = [
        parameters(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop_token_ids=stop,
            ignore_eos=True,  # the model's own: `stop` has all that end an answer
            logprobs=0,  # of the token that was drawn alone
            detokenize=False,
        )
        for seed in seeds
    ]
    rows = [{"prompt_token_ids": prompts[row // each]} for row in range(len(seeds))]
    outputs = [output.outputs[0] for output in engine.generate(rows, settings, use_tqdm=False)]
    return [
        {
            "tokens": list(output.token_ids),
            "logp": [
                step[token].logprob
                for token, step in zip(output.token_ids, output.logprobs, strict=True)
            ],
            "finish": output.finish_reason,
        }
        for output in outputs
    ]


def _read(lines: queue.SimpleQueue) -> None:
    """Hand on what comes in; at its end, end this process and those that it has started."""
    for line in sys.stdin.buffer:
        lines.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def main() -> None:
    # the answers have a copy of standard output; what else is printed goes to standard error
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # a scheduler may send it to every process of a job; the trainer hears it, and ends this one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lines: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    engine = None
    while True:
        request = json.loads(lines.get())
        name, arguments = request["call"], request["arguments"]
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            if name == "start":
                engine = start(**arguments)
                version = importlib.import_module("vllm").__version__
                answer["result"] = {"engine": f"vllm {version}"}
            else:
                answer["result"] = {"load": load, "sample": sample}[name](engine, **arguments)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
