// Beside page.js where a server answers: a chat, whose turns have their trace below them.

const TURNS_SENT = 8; // of earlier turns, as many as the server reads

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

// A question and its reply: while it is written the canvas, then the answer, its sources and its trace.
class Turn {
  constructor(asked) {
    this.asked = asked;
    this.answer = null;
    this.reply = make("div", "reply", make("p", "note", "waiting"));
    this.node = make("li", "", make("p", "said-by-you", asked), this.reply);
    byId("turns").append(this.node);
    this.node.scrollIntoView({ block: "nearest" });
  }

  take(name, data) {
    if (name === "error") throw new Error(data.error.message);
    if (name === "start") this.start(data);
    else if (name === "step") this.step(data);
    else this.finish(data);
  }

  start({ id, question, canvas, guesses, ghosts, settings }) {
    const { questions } = page.data;
    this.number = questions.length;
    this.side = { canvas, guesses, ghosts, settings, steps: [], end: null };
    questions.push({ id, question, sides: [this.side] });
    page.list();
    this.rollout = new Rollout(canvas);
    this.writing = make("p", "writing");
    this.found = make("p", "note");
    const other = question === this.asked ? [] : [make("p", "note", `understood as: ${question}`)];
    this.reply.replaceChildren(...other, this.writing, this.found);
  }

  step(step) {
    const { rollout, side } = this, before = side.steps.at(-1)?.passages ?? [];
    side.steps.push(step);
    rollout.addStep(step);
    rollout.move(rollout.last);
    const end = rollout.canvas.findIndex((token) => token?.end);
    const shown = rollout.canvas.slice(0, end < 0 ? rollout.canvas.length : end).map((token, place) => {
      const guess = token ? null : rollout.ghost(place);
      if (guess?.end) return "";
      return token ? make("span", token.step === rollout.at ? "now" : "", token.text) : make("i", "ghost", guess?.text ?? "\u00b7");
    });
    this.writing.replaceChildren(...shown);
    const fresh = step.passages.filter((name) => !before.includes(name)).map((name) => rollout.titleOf(name));
    if (fresh.length) this.found.textContent = `step ${step.step}, found: ${fresh.join("; ")}`;
    if (this.trace?.open) page.addStep(step);
  }

  finish(end) {
    const { rollout, side } = this, { answer, abstained, error, cited, closest, response } = end;
    side.end = end;
    rollout.finish(end);
    this.answer = answer;
    const plain = !rollout.steps.some(({ written }) => written.length); // a greeting
    const said = error || (plain ? response : answer) || abstained || response || "none";
    const look = error ? "said wrong" : plain ? "" : answer ? "said" : "said none";
    const parts = [...this.reply.querySelectorAll(".note:first-child"), make("p", look, said)];
    const because = end.sources.filter(({ kind }) => kind === "reasoning").map(({ text }) => pieced(text, () => null).join(""));
    if (answer && because.length) parts.push(make("p", "because", because.join(" ")));
    if (closest.length) parts.push(make("ul", "cited", ...closest.map(({ title, sentence }) => make("li", "", `${title}: `, make("mark", "", sentence)))));
    else if (cited.length) parts.push(make("ol", "cited", ...cited.map((name) => this.source(name))));
    const { length } = side.steps;
    if (length > 1) parts.push(this.fold(`How: ${many(length - 1, "step")}, ${many(side.steps.filter((step) => step.searched).length, "search", "searches")}`));
    this.reply.replaceChildren(...parts);
    byId("told").textContent = said;
  }

  // A passage, folded: its title, then its text with the words marked that the answer has from it.
  source(name) {
    const { title, body } = this.rollout.texts.get(name), taken = this.rollout.taken.get(name) ?? new Map();
    const mark = (word, shown) => (taken.has(word) ? make("mark", "", shown) : null);
    return make("li", "", make("details", "", make("summary", "", ...pieced(title, () => null)), make("p", "", ...pieced(body, mark))));
  }

  // There is one player; it is where it was opened last.
  fold(words) {
    this.trace = make("details", "trace", make("summary", "", words));
    this.trace.addEventListener("toggle", () => {
      if (!this.trace.open) return;
      for (const other of document.querySelectorAll(".trace[open]")) other.open = other === this.trace;
      this.trace.append(document.querySelector("main"));
      page.open(this.number);
    });
    return this.trace;
  }

  fail(words) {
    this.reply.replaceChildren(make("p", "said wrong", words));
    byId("told").textContent = words;
  }
}

class Chat {
  constructor() {
    this.turns = [];
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      const asked = byId("asked").value.trim();
      if (asked) this.ask(asked);
    });
    byId("examples").addEventListener("click", ({ target }) => {
      if (target.tagName === "BUTTON") this.ask(target.textContent);
    });
  }

  async ask(question) {
    if (this.busy) return;
    this.busy = true;
    const key = byId("key").value, button = document.querySelector("#ask button");
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    const messages = this.turns.filter(({ answer }) => answer !== null).slice(-TURNS_SENT).flatMap(({ asked, answer }) => [
      { role: "user", content: asked }, { role: "assistant", content: answer },
    ]);
    messages.push({ role: "user", content: question });
    byId("intro").hidden = byId("examples").hidden = button.disabled = true;
    byId("asked").value = "";
    const turn = new Turn(question);
    this.turns.push(turn);
    try {
      const reply = await fetch("/v1/answers", { method: "POST", headers, body: JSON.stringify({ messages }) });
      if (!reply.ok) throw new Error((await reply.json()).error.message);
      for await (const [name, data] of eventsOf(reply.body)) turn.take(name, data);
    } catch (error) {
      turn.fail(error.message);
    }
    this.busy = button.disabled = false;
    turn.node.scrollIntoView({ block: "nearest" });
    byId("asked").focus();
  }
}

const chat = new Chat();
