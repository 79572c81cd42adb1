// Beside page.js where a server answers: asks a question and plays its steps as they come.

async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [, name, data] = block.match(/^event: (.*)\ndata: (.*)$/);
      yield [name, JSON.parse(data)];
    }
  }
}

class Asking {
  constructor() {
    byId("question").textContent = "Ask, and watch the answer being written";
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(byId("asked").value, byId("key").value);
    });
    byId("examples").addEventListener("click", ({ target }) => {
      if (target.tagName !== "BUTTON") return;
      byId("asked").value = target.textContent;
      this.ask(target.textContent, byId("key").value);
    });
  }

  async ask(question, key) {
    byId("told").textContent = "waiting";
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    try {
      const body = JSON.stringify({ messages: [{ role: "user", content: question }] });
      const reply = await fetch("/v1/answers", { method: "POST", headers, body });
      if (!reply.ok) throw new Error((await reply.json()).error.message);
      for await (const [name, data] of eventsOf(reply.body)) this.take(name, data);
    } catch (error) {
      byId("told").textContent = error.message;
    }
  }

  // The newest question is the one that runs; it grows too while another one is looked at.
  take(name, data) {
    const { questions } = page.data;
    if (name === "error") throw new Error(data.error.message);
    if (name === "start") {
      const { id, question, canvas, guesses, ghosts, settings } = data;
      this.number = questions.length;
      this.side = { canvas, guesses, ghosts, settings, steps: [], end: null };
      questions.push({ id, question, sides: [this.side] });
      page.list();
      page.open(this.number);
      byId("told").textContent = "running";
      return;
    }
    if (name === "step") this.side.steps.push(data);
    else this.side.end = data;
    if (name === "end") byId("told").textContent = "";
    if (page.number !== this.number) return;
    if (name === "step") page.addStep(data);
    else page.finish(data);
  }
}

const asking = new Asking();
