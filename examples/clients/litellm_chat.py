"""LiteLLM: two turns, the second as a stream.

pip install litellm; dlm-rag serve; python litellm_chat.py [ADDRESS]
"""

import sys

import litellm

server = {
    "model": "openai/dlm-rag-smollm2",
    "api_base": sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000/v1",
    "api_key": "none",
}
messages = [{"role": "user", "content": "What is Kellerup?"}]
answer = litellm.completion(messages=messages, **server)
message = answer.choices[0].message
print(message.content)
print(f"  reasoning: {message.reasoning_content}")

messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": "What is it?"}]
for chunk in litellm.completion(messages=messages, stream=True, **server):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
