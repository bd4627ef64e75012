"""Stands in for scripts/vllm_worker.py: `python engine_worker.py MODE [FILE]`, standard library
only.

It says each call on standard error, with the number of tensors in the folder that it is shown.
Modes: `good` answers with tokens that depend on a row's seed alone; `replay FILE` answers as
recorded, and refuses a request that is not the recorded one; the others go wrong at `sample`, or
(`asleep`) before.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

LOGP = -2.0  # of every token


def say(text):
    print(text, file=sys.stderr, flush=True)


def row(seed, max_tokens, stop, **_):
    """Tokens of an 83-token vocabulary."""
    random.seed(seed)
    tokens = random.choices(
        [t for t in range(83) if t not in stop], k=random.randint(1, max_tokens)
    )
    ended = len(tokens) < max_tokens
    tokens += [stop[0]] if ended else []
    return {"tokens": tokens, "logp": [LOGP] * len(tokens), "finish": "stop" if ended else "length"}


def tensors(folder):
    with open(f"{folder}/model.safetensors", "rb") as file:
        return len(json.loads(file.read(int.from_bytes(file.read(8), "little")))) - 1  # metadata


def replayed(file, number, name, arguments):
    with open(file, encoding="utf-8") as recorded:
        want = json.load(recorded)["calls"][number - 1]
    if "folder" in arguments:
        arguments["folder"] = "FOLDER"
    if [name, arguments] != [want["call"], want["arguments"]]:
        raise ValueError(f"call {number} was {want['call']} {want['arguments']}")
    return want["result"]


def go_wrong(mode):
    if mode == "dies":
        say("out of memory")
        sys.exit(3)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "orphan":  # which keeps our output open
        say(f"child {subprocess.Popen(['sleep', '600']).pid}")
        os._exit(1)
    if mode == "hangs":
        time.sleep(600)
    if mode == "mute":
        os.close(1)
        time.sleep(600)


def answer(mode, request):
    number, name, arguments = request["id"], request["call"], request["arguments"]
    if mode == "replay":
        return {"id": number, "result": replayed(sys.argv[2], number, name, arguments)}
    if name != "sample":
        say(f"{name} {tensors(arguments['folder'])} tensors {arguments.get('options', '')}")
        return {"id": number, "result": None}
    say(f"sample {len(arguments['seeds'])} rows")
    go_wrong(mode)
    if mode == "refuses":
        return {"id": number, "error": "ValueError: no"}
    if mode == "late":
        return {"id": number - 1, "result": None}
    rows = [row(seed, **arguments) for seed in arguments["seeds"]]
    if mode == "few":
        rows = rows[1:]
    return {"id": number, "result": rows}


def main():
    mode = sys.argv[1]
    if mode == "asleep":
        time.sleep(600)
    for line in sys.stdin:
        request = json.loads(line)
        if mode == "nonsense" and request["call"] == "sample":
            print("INFO hello", flush=True)
            continue
        print(json.dumps(answer(mode, request)), flush=True)
        if mode == "deaf":
            time.sleep(600)


if __name__ == "__main__":
    main()
