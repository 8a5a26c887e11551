"""Serve requests that arrive while others run: add, step, take tokens as they come."""

import depthfx
from depthfx.smollm2 import load_smollm2


def main() -> dict[str, str]:
    """Two requests at once and a third that arrives later; returns the answers by request id."""
    model, tokenizer = load_smollm2()
    model = depthfx.compile(model, max_batch_size=4)
    engine = model.engine
    sampling = depthfx.SamplingParams(max_new_tokens=16, eos_token_ids=(tokenizer.eos_token_id,))

    def add(name: str, text: str) -> None:
        engine.add(tokenizer(text)["input_ids"], sampling=sampling, request_id=name)

    tokens: dict[str, list[int]] = {"gravity": [], "water": [], "late": []}
    add("gravity", "Gravity is")
    add("water", "Water boils at")
    steps = 0
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id].extend(output.new_token_ids)
        steps += 1
        if steps == 4:
            add("late", "The capital of France is")
    answers = {name: tokenizer.decode(ids, skip_special_tokens=True) for name, ids in tokens.items()}
    for name, text in answers.items():
        print(f"{name}: {text!r}")
    return answers


if __name__ == "__main__":
    main()
