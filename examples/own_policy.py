"""A policy of one's own: generated tokens at odd positions leave four layers out (their keys and values are written all the same)."""

import depthfx
from depthfx.contracts import Decision, Policy, Rows
from depthfx.skippers import make_skipper
from depthfx.smollm2 import load_smollm2


class EverySecond(Policy):
    """Decides with tensors alone, so that it can be compiled into the step: True is RUN, False is PROJECT_ONLY."""

    def forward(self, rows: Rows) -> Decision:
        """Prompts run every layer."""
        return Decision(rows.is_prompt | (rows.positions % 2 == 0))


def main() -> str:
    """Generate with the policy; returns the text."""
    model, tokenizer = load_smollm2()
    model = depthfx.compile(model, skipper=make_skipper(model, EverySecond(), layers=range(18, 22)))
    output = model.generate(**tokenizer("The capital of France is", return_tensors="pt"), max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(output[0])
    print(text)
    return text


if __name__ == "__main__":
    main()
