"use strict";
// Plays a denoising. Nothing is fetched, and what a trace holds is only ever set as text.
// The data are those of record.py: a running trace is added to by `page.addStep`, ended by `page.finish`.

const EDITED = 1, END = 2; // flags of a written token, as in record.py
const SHADES = 7; // of steps, from the first to the last
const SURE = [0.5, 0.7, 0.9, 0.99]; // bounds between shades of confidence
const SPEEDS = [0.5, 1, 2, 5, 10, 30, 60]; // steps a second
const SECONDS = 15; // that playing all of a trace takes at most, where a speed is fast enough
const LEAP = 10; // steps, with the shift key
const LOOKS = 8; // at steps, for the room that a canvas with guesses takes
const SETTLED = 300; // milliseconds after which a step is where a reader stays

const byId = (id) => document.getElementById(id);
const wordsOf = (text) => text.split(/\s+/).filter(Boolean);
const shadeOf = (confidence) => SURE.filter((bound) => confidence >= bound).length;
const NARROW = matchMedia("(max-width: 56rem)");
const many = (count, one, more = `${one}s`) => `${count} ${count === 1 ? one : more}`;

function make(tag, className = "", ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

// A text cut up by `pieces` of record.py, with those of its words in an element that `wrap` makes for them.
function pieced(pieces, wrap) {
  return pieces.map((piece) => {
    if (typeof piece === "string") return piece;
    const [shown, word = shown] = piece;
    return wrap(word, shown) ?? shown;
  });
}

// One trace of a question: the canvas at any step, moved from step to step by what changes.
class Rollout {
  constructor(length) {
    this.steps = [];
    this.texts = new Map(); // of passages, by id
    this.newest = Array(length).fill(null); // the canvas after the last step: tokens, or null where masked
    this.canvas = Array(length).fill(null); // the canvas after step `at`
    this.newestGuess = Array(length).fill(null); // the last guess at each position: { text, end }
    this.guess = Array(length).fill(null); // that after step `at`
    this.guessable = new Map(); // tokens of guesses, by id
    this.at = 0;
    this.taken = new Map(); // by passage: each word that the response takes from it, with its step
    this.wordAt = new Map(); // by position: the word that the token writes into
    this.end = null;
  }

  get last() {
    return Math.max(0, this.steps.length - 1);
  }

  addStep(step) {
    const number = this.steps.length, changes = [];
    const write = (position, token) => {
      changes.push([position, this.newest[position], token]);
      this.newest[position] = token;
    };
    for (const position of step.remasked) write(position, null);
    for (const [position, text, confidence, flags] of step.written) {
      const was = flags & EDITED ? this.newest[position]?.text : undefined;
      write(position, { text, confidence, step: number, end: Boolean(flags & END), was });
    }
    for (const [name, text] of Object.entries(step.texts)) this.texts.set(name, text);
    const { confidence = "", changed = [], texts = [] } = step.ghosts ?? {}, guesses = [];
    for (const [id, text, flags] of texts) this.guessable.set(id, { text, end: Boolean(flags & END) });
    for (let n = 0; n < changed.length; n += 2) {
      const position = changed[n], token = this.guessable.get(changed[n + 1]);
      guesses.push([position, this.newestGuess[position], token]);
      this.newestGuess[position] = token;
    }
    const before = number ? this.steps[number - 1].asked : null;
    this.steps.push({ ...step, changes, guesses, confidence, before, asked: step.query ?? before });
  }

  finish(end) {
    this.end = end;
    for (const { word, at, step, passage } of end.words) {
      for (const position of at) this.wordAt.set(position, { word, passage });
      if (passage === null) continue;
      const words = this.taken.get(passage) ?? new Map();
      words.set(word, Math.min(step, words.get(word) ?? Infinity));
      this.taken.set(passage, words);
    }
  }

  // Moves the canvas; returns the positions that may look otherwise now.
  move(to) {
    const from = this.steps[this.at], touched = new Set(from?.changes.map(([position]) => position));
    const put = (tokens, position, token) => {
      tokens[position] = token;
      touched.add(position);
    };
    while (this.at < to) {
      const { changes, guesses } = this.steps[++this.at];
      for (const [position, , token] of guesses) put(this.guess, position, token);
      for (const [position, , token] of changes) put(this.canvas, position, token);
    }
    while (this.at > to) {
      const { changes, guesses } = this.steps[this.at--];
      for (const [position, token] of guesses) put(this.guess, position, token);
      for (const [position, token] of changes.toReversed()) put(this.canvas, position, token);
    }
    const [one, other] = [from, this.steps[this.at]].map((step) => step?.confidence ?? "");
    for (let n = 0; 2 * n < Math.max(one.length, other.length); n++) {
      if (one[2 * n] !== other[2 * n] || one[2 * n + 1] !== other[2 * n + 1]) touched.add(n);
    }
    return touched;
  }

  // What is guessed at a masked position, and how surely; null where nothing is known of it.
  ghost(position) {
    const sure = this.steps[this.at]?.confidence.slice(2 * position, 2 * position + 2).trim();
    return sure ? { ...this.guess[position], confidence: Number(sure) / 100 } : null;
  }

  // The words on the canvas, as they would stand in a query.
  wordsOnCanvas() {
    return new Set(wordsOf(this.canvas.map((token) => (token && !token.end ? token.text : " ")).join("")));
  }

  titleOf(passage) {
    return pieced(this.texts.get(passage)?.title ?? [passage], () => null).join("");
  }
}

// What is seen of one trace.
class Pane {
  constructor({ question, gold = [] }, side, name, settings) {
    this.question = question;
    this.side = side;
    this.rollout = new Rollout(side.canvas);
    this.cards = new Map();
    this.reached = 0; // the position that the tab key leads to
    this.told = null; // the position that the line of facts is about
    this.node = make("section", "pane");
    this.state = make("p", "state");
    this.bridges = make("table", "bridges");
    this.canvas = make("div", "canvas");
    this.canvas.role = "group";
    this.canvas.ariaLabel = "Canvas; arrow keys go from token to token";
    this.tokens = this.rollout.newest.map(() => make("span", "t"));
    this.tokens.forEach((node) => (node.tabIndex = -1));
    this.canvas.append(...this.tokens);
    this.drawn = this.tokens.map(() => "");
    this.ghosts = this.tokens.map(() => "");
    this.facts = make("p", "facts");
    this.legend = side.ghosts
      ? make("span", "note", "and ", make("i", "ghost", "guesses, not committed"))
      : make("span", "note", "its trace holds no guesses");
    this.query = make("p", "query");
    this.query.tabIndex = 0; // it scrolls where it is long
    this.query.role = "group";
    this.query.ariaLabel = "Query";
    this.asked = make("span", "note");
    this.evidence = make("ul", "evidence");
    this.found = make("span", "note");
    this.dropped = make("p", "note");
    this.pending = make("span", "note", "not written yet");
    this.final = make("span");
    this.answer = make("p", "answer", "Answer: ", this.pending, this.final);
    if (gold.length) this.answer.append(make("span", "note", `gold: ${gold.join(" or ")}`));
    this.sources = make("div", "sources");
    this.lines = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    this.lines.classList.add("lines");
    this.lines.ariaHidden = "true";
    if (name) this.node.append(make("h3", "", name, " ", make("small", "", settings.join(" "))));
    const key = make("p", "note key", make("ins", "", "new"), " ", make("del", "", "gone"));
    if (side.guesses) key.append(" ", make("i", "guess", "guessed, not on the canvas"));
    this.node.append(
      this.state,
      make("div", "", make("h4", "", "Canvas ", this.legend), this.canvas, this.facts, this.answer),
      make("div", "asked", make("h4", "", "Query ", this.asked), this.query, key),
      make("div", "found", make("h4", "", "Evidence ", this.found), this.evidence, this.dropped),
      this.bridges,
      this.sources,
    );
    if (side.settings.length) {
      const all = side.settings.join("\n");
      this.node.append(make("details", "settings", make("summary", "", "Settings"), all));
    }
    this.node.append(this.lines);
    this.tell(null);
    if (this.tokens.length) this.tokens[0].tabIndex = 0;
    this.canvas.addEventListener("pointerover", (event) => {
      this.facts.ariaLive = "off"; // what a pointer passes over is not said
      if (event.target !== this.canvas) this.tell(this.tokens.indexOf(event.target));
    });
    this.canvas.addEventListener("pointerleave", () => this.tell(null));
    this.canvas.addEventListener("focusout", () => this.tell(null));
    this.canvas.addEventListener("focusin", (event) => this.reach(this.tokens.indexOf(event.target)));
    this.canvas.addEventListener("keydown", (event) => this.walk(event));
  }

  // Makes a token the one that the tab key leads to, and tells what is known of it.
  reach(position) {
    this.tokens[this.reached].tabIndex = -1;
    this.reached = position;
    this.tokens[position].tabIndex = 0;
    this.facts.ariaLive = "polite";
    this.tell(position);
  }

  walk(event) {
    const last = this.tokens.length - 1, here = this.reached;
    const to = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    this.tokens[Math.min(last, Math.max(0, to))].focus();
  }

  // What is known of the token at a position; of a passage only for the token that stays.
  tell(position) {
    this.told = position;
    if (position === null) {
      this.facts.textContent = "Point at a token, or go to one by its keys, for its step, confidence and source.";
      for (const card of this.cards.values()) card.node.classList.remove("source");
      this.drawLines();
      return;
    }
    const { canvas, newest, wordAt } = this.rollout, token = canvas[position];
    const facts = [`position ${position}`];
    let source = null;
    if (token) {
      facts.unshift(`\u201c${token.text}\u201d`);
      facts.push(`step ${token.step}`, `confidence ${token.confidence.toFixed(3)}`);
      if (token.was !== undefined) facts.push(`in place of \u201c${token.was}\u201d`);
      const known = token === newest[position] ? wordAt.get(position) : undefined;
      if (known) {
        source = known.passage;
        facts.push(source === null
          ? `\u201c${known.word}\u201d is in no passage that was in context`
          : `\u201c${known.word}\u201d from ${this.rollout.titleOf(source)} (${source})`);
      }
    } else {
      const ghost = page.ghosts ? this.rollout.ghost(position) : null;
      facts.unshift(ghost ? `guess \u201c${ghost.text}\u201d` : "masked");
      if (ghost) facts.push("not committed", `confidence ${ghost.confidence.toFixed(2)}`);
    }
    this.facts.textContent = facts.join(" \u00b7 ");
    for (const [name, card] of this.cards) card.node.classList.toggle("source", name === source);
    this.drawLines();
  }

  // Lines from words to where their passages have them: words that this step completes, and the one pointed at.
  drawLines() {
    const { rollout, told } = this, { at, canvas, newest, end } = rollout, paths = [];
    const box = this.node.getBoundingClientRect();
    for (const { word, at: places, step, passage } of end?.words ?? []) {
      const strong = places.includes(told), card = this.cards.get(passage);
      const stays = places.every((place) => canvas[place] && canvas[place] === newest[place]);
      if (!stays || !(strong || step === at) || !card?.node.isConnected) continue;
      const mark = card.marks.get(word)?.at(-1);
      if (!mark) continue;
      const from = this.tokens[places.at(-1)].getBoundingClientRect(), to = mark.getBoundingClientRect();
      const [x, y] = [from.left + from.width / 2 - box.left, from.bottom - box.top - 2];
      const [left, right] = [to.left - box.left - 2, to.top + to.height / 2 - box.top], half = (y + right) / 2;
      const bend = left > x ? `${(x + left) / 2} ${y} ${(x + left) / 2} ${right}` : `${x} ${half} ${left} ${half}`;
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M${x} ${y} C${bend} ${left} ${right}`);
      if (strong) path.classList.add("strong");
      paths.push(path);
    }
    this.lines.replaceChildren(...paths);
  }

  addStep(step) {
    this.rollout.addStep(step);
  }

  finish(end) {
    this.rollout.finish(end);
    this.drawBridges(end.bridges);
    this.drawAnswer(end, this.side.right);
  }

  // Shows the trace after a step; of a shorter one the last.
  show(number, all = false) {
    const { rollout } = this, at = Math.min(number, rollout.last);
    const touched = rollout.move(at), step = rollout.steps[at];
    if (all) this.tokens.forEach((_, position) => touched.add(position));
    for (const position of [...touched]) touched.add(position + 1); // which may repeat what stands before it
    const remasked = new Set(step?.remasked);
    for (const position of touched) if (position < this.tokens.length) this.draw(position, remasked);
    const done = rollout.end !== null && number >= rollout.last;
    this.pending.hidden = done;
    this.final.hidden = this.sources.hidden = !done;
    this.drawState(step, at, done);
    if (!step) return;
    this.drawQuery(step);
    this.drawEvidence(step, at);
    for (const cell of this.bridges.querySelectorAll("[data-step]")) {
      cell.classList.toggle("reached", at >= Number(cell.dataset.step));
    }
    this.tell(this.told);
  }

  draw(position, remasked) {
    const { canvas, at, last } = this.rollout, token = canvas[position], node = this.tokens[position];
    const text = token?.text ?? "";
    if (this.drawn[position] !== text) this.drawn[position] = node.textContent = text;
    if (!token) {
      let look = remasked.has(position) ? "t fallen" : "t";
      const ghost = this.rollout.ghost(position);
      if (ghost) {
        look += ` g g${shadeOf(ghost.confidence)}`;
        const again = canvas[position - 1]?.end || this.rollout.ghost(position - 1)?.end;
        if (ghost.end) look += again ? " end repeated" : " end";
        // In an attribute, from where the style shows it: it is no text of the page, and is not said.
        const line = ghost.text.replaceAll("\n", "\u21b5"), shown = line.trim() ? line : "\u00b7";
        if (this.ghosts[position] !== shown) this.ghosts[position] = node.dataset.guess = shown;
      }
      if (node.className !== look) node.className = look;
      return;
    }
    const shade = Math.min(SHADES - 1, Math.floor(((token.step - 1) * SHADES) / Math.max(1, last)));
    let look = `t w s${shade} c${shadeOf(token.confidence)}`;
    if (token.step === at) look += " now";
    if (token.end) look += canvas[position - 1]?.end ? " end repeated" : " end";
    if (token.was !== undefined) look += " edited";
    node.className = look;
  }

  drawState(step, at, done) {
    const { canvas, last, end } = this.rollout;
    const parts = [`step ${at} of ${last}`, `${canvas.filter(Boolean).length} of ${canvas.length} tokens`];
    if (step?.written.length) parts.push(`${step.written.length} written now`);
    if (step?.remasked.length) parts.push(`${step.remasked.length} masked again`);
    if (done) parts.push(end.error ? "failed" : "finished");
    this.state.textContent = parts.join(" \u00b7 ");
  }

  // The query in words: those that are new, those that the canvas does not hold (yet), those that are gone.
  drawQuery(step) {
    const now = wordsOf(step.asked ?? ""), before = new Set(wordsOf(step.before ?? ""));
    const question = wordsOf(this.question);
    const asks = question.every((word, place) => now[place] === word) ? question.length : 0;
    const held = this.side.guesses ? this.rollout.wordsOnCanvas() : null;
    const parts = [];
    let same = ""; // words in a row that are nothing of this
    now.forEach((word, place) => {
      const fresh = step.before !== null && !before.has(word);
      const guess = held !== null && place >= asks && !held.has(word);
      if (!fresh && !guess) {
        same += `${word} `;
        return;
      }
      const shown = guess ? make("i", "guess", word) : word;
      parts.push(same, fresh ? make("ins", "", shown) : shown);
      same = " ";
    });
    parts.push(same);
    const kept = new Set(now);
    const gone = [...before].filter((word) => !kept.has(word));
    if (gone.length) parts.push(make("del", "", gone.join(" ")));
    this.query.replaceChildren(...parts);
    this.asked.textContent = step.query === null ? "none was due: the last one stays"
      : step.searched ? "searched" : "not searched again";
  }

  drawEvidence(step, at) {
    const before = at ? this.rollout.steps[at - 1].passages : [];
    const left = before.filter((name) => !step.passages.includes(name));
    const shown = step.passages.map((name) => [name, at && !before.includes(name) ? "new" : ""]);
    for (const name of left) shown.push([name, "left"]);
    const cards = shown.map(([name, what]) => this.card(name, what, at));
    const there = this.evidence.children; // that stay where they are are left alone
    if (cards.length !== there.length || cards.some((card, place) => card !== there[place])) {
      this.evidence.replaceChildren(...cards);
    }
    const fresh = shown.filter(([, what]) => what === "new").length;
    this.found.textContent = many(step.passages.length, "passage")
      + (fresh ? `, ${fresh} new` : "") + (left.length ? `, ${left.length} left` : "");
    this.dropped.textContent = step.dropped.length
      ? `found, without room in the prompt: ${step.dropped.map((name) => this.rollout.titleOf(name)).join("; ")}`
      : "";
  }

  // The card of a passage, with the words marked that the response has taken from it by a step.
  card(name, what, at) {
    let card = this.cards.get(name);
    if (!card) {
      card = { marks: new Map(), title: make("b"), badge: make("span", "badge"), body: make("p"), marked: -1 };
      card.node = make("li", "", make("div", "", card.badge, card.title, " ", make("small", "", name)), card.body);
      this.cards.set(name, card);
    }
    const bridge = this.rollout.end?.bridges.some(({ passage }) => passage === name);
    card.node.className = `card ${what}`;
    card.badge.textContent = [what, bridge ? "bridge" : ""].filter(Boolean).join(" \u00b7 ");
    const taken = [...(this.rollout.taken.get(name) ?? [])].filter(([, step]) => step <= at);
    if (card.marked !== taken.length) {
      const text = this.rollout.texts.get(name);
      card.marks = new Map(taken.map(([word]) => [word, []]));
      const mark = (word, shown) => {
        if (!card.marks.has(word)) return null;
        const node = make("mark", "", shown);
        card.marks.get(word).push(node);
        return node;
      };
      card.title.replaceChildren(...pieced(text.title, mark));
      card.body.replaceChildren(...pieced(text.body, mark));
      card.marked = taken.length;
    }
    return card.node;
  }

  drawBridges(bridges) {
    this.bridges.replaceChildren();
    if (!bridges.length) return;
    const jump = (step, what) => {
      if (step === null) return make("td", "never", "never");
      const button = make("button", "", `step ${step}`);
      button.type = "button";
      button.ariaLabel = `Go to step ${step}: ${what}`;
      button.dataset.step = step;
      button.addEventListener("click", () => page.go(step));
      return make("td", "", button);
    };
    const titles = [["Bridge", ""], ["in the query", "asks"], ["its passage in the evidence", "finds"]];
    const heads = titles.map(([text, kind]) => {
      const head = make("th", kind, text);
      head.scope = "col";
      return head;
    });
    this.bridges.append(make("thead", "", make("tr", "", ...heads)));
    const rows = bridges.map(({ entity, asked, found }) => {
      const head = make("th", "", entity);
      head.scope = "row";
      return make("tr", "", head, jump(asked, `${entity} in the query`), jump(found, `${entity} in the evidence`));
    });
    this.bridges.append(make("tbody", "", ...rows));
  }

  drawAnswer({ answer, abstained, error, sources, closest }, right) {
    this.final.replaceChildren(error ? "none, " : "", make("b", "", error || answer || abstained || "none"));
    if (right !== undefined) this.final.append(" ", make("span", right ? "right" : "wrong", right ? "right" : "wrong"));
    let bare = false;
    const rows = sources.map(({ text, unsupported, passages }) => {
      const none = new Set(unsupported);
      bare ||= none.size > 0;
      const said = make("span", "", ...pieced(text, (word, shown) => (none.has(word) ? make("u", "", shown) : null)));
      const from = passages.map(([name, step]) => `${this.rollout.titleOf(name)} (${name}, step ${step})`);
      return make("li", "", said, make("small", "", from.join("; ") || (none.size ? "no passage holds these words" : "")));
    });
    if (rows.length) this.sources.replaceChildren(make("h4", "", "Sources"), make("ul", "", ...rows));
    if (closest.length) {
      const near = closest.map(({ id, title, sentence }) =>
        make("li", "", make("mark", "", sentence), make("small", "", title === id ? id : `${title} (${id})`)));
      this.sources.append(make("h4", "", "Closest"), make("ul", "", ...near));
    }
    if (bare) this.sources.append(make("p", "note", make("u", "", "underlined"), ": in no passage that was in context"));
  }

  // The canvas gets the room that it has in the end, and on the way there, so that nothing below it jumps.
  reserve() {
    const { at, last } = this.rollout, heights = [];
    this.canvas.style.minHeight = "";
    for (let n = this.side.ghosts && page.ghosts ? 1 : LOOKS; n <= LOOKS; n++) {
      this.show(Math.ceil((last * n) / LOOKS));
      heights.push(this.canvas.offsetHeight);
    }
    this.canvas.style.minHeight = `${Math.max(...heights)}px`;
    this.show(at);
  }

  // A step in words, for who does not see it.
  describe(at) {
    const step = this.rollout.steps[Math.min(at, this.rollout.last)];
    if (!step) return this.state.textContent;
    const fresh = this.query.querySelectorAll("ins").length;
    return [
      this.state.textContent, fresh ? `${many(fresh, "new word")} in the query` : "",
      this.found.textContent,
    ].filter(Boolean).join(", ");
  }
}

// The questions, the slider, and what both of them move.
class Page {
  constructor(data) {
    this.data = data;
    this.panes = [];
    this.at = 0;
    this.timer = this.settling = null;
    this.ghosts = true; // whether they are shown
    this.step = byId("step");
    for (const speed of SPEEDS) {
      const option = make("option", "", `${speed} a second`);
      option.value = speed;
      byId("speed").append(option);
    }
    this.list();
    this.listen();
  }

  get last() {
    return Math.max(0, ...this.panes.map((pane) => pane.rollout.last));
  }

  list() {
    const { questions, left_out: out } = this.data;
    byId("questions").hidden = questions.length < 2;
    byId("left-out").hidden = !out;
    byId("left-out").textContent = `${many(out, "question")} that only one of the traces has: left out`;
    this.items = questions.map(({ question, hops, sides }, number) => {
      const button = make("button", "", question), known = make("small");
      if (hops) known.append(many(hops, "hop"), " ");
      for (const { right } of sides) {
        if (right !== undefined) known.append(make("span", right ? "right" : "wrong", right ? "right" : "wrong"), " ");
      }
      if (known.childNodes.length) button.append(known);
      button.type = "button";
      button.addEventListener("click", () => {
        this.open(number);
        if (NARROW.matches) byId("questions").open = false; // which covers what was asked for
      });
      return button;
    });
    const rows = this.items.map((item) => make("li", "", item));
    byId("questions").querySelector("ul").replaceChildren(...rows);
    this.choices("hops", "any hops", ({ hops }) => hops && many(hops, "hop"));
    this.choices("outcome", "any answer", (question) => this.outcome(question));
    this.filter();
  }

  // Right or wrong, in words; of two traces with their names.
  outcome({ sides }) {
    if (sides.some(({ right }) => right === undefined)) return "";
    const names = this.data.names, said = (right) => (right ? "right" : "wrong");
    return sides.map(({ right }, n) => (sides.length > 1 ? `${names[n]} ${said(right)}` : said(right))).join(", ");
  }

  // What a list can be narrowed down to, with how many there are; nothing where there is no choice.
  choices(id, all, labelOf) {
    const counts = new Map();
    for (const label of this.data.questions.map(labelOf).filter(Boolean).sort()) {
      counts.set(label, (counts.get(label) ?? 0) + 1);
    }
    const options = [["", all], ...[...counts].map(([label, count]) => [label, `${label} (${count})`])];
    byId(id).hidden = counts.size < 2;
    byId(id).replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  }

  filter() {
    const sought = byId("sought").value.toLowerCase(), hops = byId("hops").value, outcome = byId("outcome").value;
    this.data.questions.forEach((one, number) => {
      const fits = (!hops || many(one.hops, "hop") === hops) && (!outcome || this.outcome(one) === outcome);
      this.items[number].parentNode.hidden = !fits || !one.question.toLowerCase().includes(sought);
    });
    const shown = this.shownItems(), all = this.items.length;
    byId("count").textContent = shown.length < all ? `(${shown.length} of ${all})` : `(${all})`;
    this.lead();
  }

  shownItems() {
    return this.items.filter((item) => !item.parentNode.hidden);
  }

  // The tab key leads to the question that is open, or to the first of those shown.
  lead() {
    const shown = this.shownItems(), current = this.items[this.number];
    const first = shown.includes(current) ? current : shown[0];
    this.items.forEach((item) => (item.tabIndex = item === first ? 0 : -1));
  }

  // Shows a question from its first step on.
  open(number, at = 0) {
    this.pause();
    this.number = number;
    const { question, hops, sides } = this.data.questions[number];
    byId("question").replaceChildren(question, hops ? make("small", "", ` ${many(hops, "hop")}`) : "");
    this.items.forEach((item, place) => (item.ariaCurrent = place === number ? "true" : null));
    this.lead();
    if (!NARROW.matches) this.show(this.items[number]);
    const { names, settings } = this.data;
    this.panes = sides.map((side, place) => {
      const pane = new Pane(this.data.questions[number], side, sides.length > 1 ? names[place] : "", settings[place]);
      for (const step of side.steps) pane.addStep(step);
      if (side.end) pane.finish(side.end);
      return pane;
    });
    byId("ghosts").disabled = !sides.some((side) => side.ghosts);
    byId("panes").className = sides.length > 1 ? "two" : "one";
    byId("panes").replaceChildren(...this.panes.map((pane) => pane.node));
    const enough = SPEEDS.find((speed) => speed * SECONDS >= this.last);
    byId("speed").value = Math.max(1, enough ?? SPEEDS.at(-1));
    this.mark();
    this.panes.forEach((pane) => {
      pane.show(0, true);
      pane.reserve();
    });
    this.go(at);
  }

  // Scrolls the list to an item. Not by scrollIntoView, from which Chromium 150 has the tab key go on.
  show(item) {
    const list = byId("questions").querySelector("ul"), end = item.offsetTop + item.offsetHeight;
    list.scrollTop = Math.min(item.offsetTop, Math.max(list.scrollTop, end - list.clientHeight));
  }

  // One more step of a trace that is running; who looks at the newest one goes along.
  addStep(step, side = 0) {
    const follows = this.at === this.last, pane = this.panes[side];
    pane.addStep(step);
    this.step.max = this.last;
    pane.show(follows ? this.last : this.at, true);
    if (follows) this.go(this.last);
  }

  // The end of a trace that was running.
  finish(end, side = 0) {
    this.panes[side].finish(end);
    this.mark();
    this.panes[side].show(this.at, true);
  }

  go(to) {
    this.at = Math.min(this.last, Math.max(0, to));
    for (const pane of this.panes) pane.show(this.at);
    this.step.value = this.at;
    this.step.ariaValueText = `step ${this.at} of ${this.last}`;
    byId("where").textContent = `step ${this.at} of ${this.last}`;
    clearTimeout(this.settling);
    this.settling = setTimeout(() => this.settle(), SETTLED);
  }

  // Where a reader stays is in the address, and is said where the slider does not say it itself.
  settle() {
    if (this.timer) return;
    history.replaceState(null, "", `#question=${this.number + 1}&step=${this.at}`);
    if (document.activeElement === this.step) return;
    const names = this.data.names;
    const said = this.panes.map((pane, place) => `${names[place] ?? ""} ${pane.describe(this.at)}`.trim());
    byId("said").textContent = said.join("; ");
  }

  // Above the slider: at which steps bridges enter queries and evidence.
  mark() {
    this.step.max = this.last;
    const rows = this.panes.map(({ rollout: { end } }, place) => {
      const row = make("div");
      for (const { asked, found } of end?.bridges ?? []) {
        for (const [step, kind] of [[asked, "asks"], [found, "finds"]]) {
          if (step === null) continue;
          const node = make("span", kind);
          node.style.setProperty("--share", step / Math.max(1, this.last));
          row.append(node);
        }
      }
      if (row.childNodes.length && this.panes.length > 1) row.append(make("b", "", this.data.names[place]));
      return row;
    });
    byId("marks").replaceChildren(...rows.filter((row) => row.childNodes.length));
  }

  play() {
    if (this.at >= this.last) this.go(0);
    const tick = () => {
      this.go(this.at + 1);
      if (this.at >= this.last) this.pause();
      else this.timer = setTimeout(tick, 1000 / Number(byId("speed").value));
    };
    this.timer = setTimeout(tick, 1000 / Number(byId("speed").value));
    byId("play").textContent = "Pause";
  }

  pause() {
    if (this.timer) clearTimeout(this.timer);
    this.timer = null;
    byId("play").textContent = "Play";
    if (this.panes.length) this.go(this.at);
  }

  toggle() {
    if (this.timer) this.pause();
    else this.play();
  }

  turn(to) {
    if (this.timer) this.pause();
    this.go(to);
  }

  colour() {
    const by = byId("colour").value;
    document.body.dataset.colour = by;
    const bounds = ["under", ...SURE];
    const shown = by === "step"
      ? ["first", ...Array(SHADES - 2).fill("\u00a0"), "last"].map((text, n) => make("span", `w s${n}`, text))
      : bounds.map((bound, n) => make("span", `w c${n}`, n ? `\u2265 ${bound}` : `under ${SURE[0]}`));
    byId("legend").replaceChildren(...shown);
  }

  // Shows guesses on the canvas, or leaves them out.
  haunt(shown) {
    this.ghosts = byId("ghosts").checked = shown;
    document.body.dataset.ghosts = shown ? "shown" : "hidden";
    for (const pane of this.panes) pane.reserve();
  }

  // The place that the address names, as in #question=2&step=7.
  visit() {
    if (!this.data.questions.length) return;
    const place = new URLSearchParams(location.hash.slice(1));
    const number = Number(place.get("question") ?? 1) - 1, at = Number(place.get("step") ?? 0);
    const known = this.data.questions[number] ? number : 0;
    if (known !== this.number) this.open(known, at || 0);
    else this.turn(at || 0);
  }

  listen() {
    const click = { first: () => 0, back: () => this.at - 1, on: () => this.at + 1, last: () => this.last };
    for (const [id, to] of Object.entries(click)) byId(id).addEventListener("click", () => this.turn(to()));
    byId("play").addEventListener("click", () => this.toggle());
    byId("colour").addEventListener("change", () => this.colour());
    byId("ghosts").addEventListener("change", (event) => this.haunt(event.target.checked));
    this.step.addEventListener("input", () => this.turn(Number(this.step.value)));
    addEventListener("hashchange", () => this.visit());
    addEventListener("keydown", (event) => this.key(event));
    let resized = null;
    addEventListener("resize", () => {
      clearTimeout(resized);
      resized = setTimeout(() => this.panes.forEach((pane) => pane.reserve()), SETTLED);
    });
    for (const id of ["sought", "hops", "outcome"]) byId(id).addEventListener("input", () => this.filter());
    const fold = () => (byId("questions").open = byId("view").open = !NARROW.matches);
    NARROW.addEventListener("change", fold);
    fold();
    byId("questions").addEventListener("keydown", (event) => {
      const by = { ArrowUp: -1, ArrowDown: 1 }[event.key], shown = this.shownItems();
      const next = shown[shown.indexOf(event.target) + by]; // from the search the first
      if (!by || !next || event.target.matches("select")) return;
      event.preventDefault();
      next.focus();
    });
  }

  key(event) {
    const on = event.target instanceof Element ? event.target : document.body;
    if (!byId("player").checkVisibility()) return; // the keys move nothing that is seen
    if (event.ctrlKey || event.altKey || event.metaKey || on.closest("select, form, [type=search]")) return;
    const by = event.shiftKey ? LEAP : 1;
    const to = { ArrowLeft: this.at - by, ArrowRight: this.at + by, Home: 0, End: this.last }[event.key];
    if (event.key === " " && !on.closest("button, summary, [type=checkbox]")) this.toggle();
    else if (event.key === "/" && this.items.length > 1) {
      byId("questions").open = true;
      byId("sought").focus();
    } else if (event.key === "g" && !byId("ghosts").disabled) this.haunt(!this.ghosts);
    else if (to !== undefined) this.turn(to);
    else return;
    event.preventDefault();
  }
}

const page = new Page(JSON.parse(byId("data").textContent));
page.colour();
page.visit();
