"""Compile a model and generate with it, as with any Hugging Face model."""

import depthfx
from depthfx.smollm2 import load_smollm2


def main() -> str:
    """Answer one question; returns the answer."""
    model, tokenizer = load_smollm2()
    model = depthfx.compile(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(answer)
    return answer


if __name__ == "__main__":
    main()
