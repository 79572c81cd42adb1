"""OpenAI's client: two turns, the second as a stream, with its sources.

pip install openai; dlm-rag serve; python openai_chat.py [ADDRESS]
"""

import sys
from typing import Any

from openai import OpenAI

client: Any = OpenAI(base_url=sys.argv[1] if sys.argv[1:] else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is Kellerup?"}]
answer = client.chat.completions.create(model=model, messages=messages)
print(answer.choices[0].message.content)
for each in answer.choices[0].message.annotations or []:
    print(f"  {each.url_citation.title}: {each.url_citation.url}")

messages += [answer.choices[0].message, {"role": "user", "content": "What is it?"}]
for chunk in client.chat.completions.create(model=model, messages=messages, stream=True):
    delta = chunk.choices[0].delta
    print(getattr(delta, "reasoning_content", None) or delta.content or "", end="", flush=True)
print(f"\n  asked: {chunk.dlm_rag['question']}")
