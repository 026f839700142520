// Streams answers. Without this script the form loads a page with the whole answers.
"use strict";
const form = document.getElementById("chat");
let running = null;

function addTurn(side, role, text) {
  const turn = document.getElementById("turn").content.firstElementChild.cloneNode(true);
  turn.className = `turn ${role}`;
  turn.querySelector("h3").textContent = role;
  turn.querySelector(".text").textContent = text;
  if (role === "user") turn.querySelector("details").remove();
  side.querySelector(".hint")?.remove();
  side.append(turn);
  return turn;
}

function addTokens(turn, tokens) {
  const list = turn.querySelector(".token-list");
  for (const [text, logprob, others] of tokens) {
    const token = document.createElement("span");
    token.className = `token l${Math.min(9, Math.floor(-logprob * 1.3))}`;
    token.title = [`logprob ${logprob.toFixed(3)}`, ...others.map(([t, l]) => `${l.toFixed(3)} ${t}`)].join("\n");
    token.textContent = text;
    list.append(token);
  }
  if (tokens.length) turn.querySelector("details").hidden = false;
}

function showProblem(turn, sentence) {
  const notice = document.createElement("p");
  notice.className = "notice bad";
  notice.setAttribute("role", "alert");
  notice.textContent = `${sentence[0].toUpperCase()}${sentence.slice(1).replace(/\.$/, "")}.`;
  turn.querySelector(".text").before(notice);
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(side, body, message, signal) {
  const number = side.dataset.side;
  addTurn(side, "user", message);
  const turn = addTurn(side, "assistant", "");
  turn.classList.add("waiting");
  const shown = turn.querySelector(".text");
  let failed = false;
  try {
    const response = await fetch("/chat/stream", {
      method: "POST", body: new URLSearchParams([...body, ["side", number]]), signal,
      headers: { Accept: "text/event-stream" },
    });
    if (!response.ok) throw new Error((await response.json()).error);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      shown.append(event.text);
      addTokens(turn, event.tokens);
      turn.querySelector(".version").textContent = event.tandem_weight_version;
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      failed = true;
      showProblem(turn, error instanceof TypeError ? "the gateway does not answer; try again" : error.message);
    }
  }
  turn.classList.remove("waiting");
  const field = form.elements[`history${number}`];
  const said = [{ role: "user", content: message }, { role: "assistant", content: shown.textContent }];
  if (!failed) field.value = JSON.stringify([...JSON.parse(field.value), ...said]);
}

function sides() {
  const box = document.getElementById("sides");
  for (const [number, name] of [["1", "model"], ["2", "model2"]]) {
    const model = form.elements[name].value;
    let side = box.querySelector(`[data-side="${number}"]`);
    if (side && side.getAttribute("aria-label") !== model) {  // another model: a new conversation
      side.remove();
      side = null;
      form.elements[`history${number}`].value = "[]";
    }
    if (model && !side) {
      side = document.createElement("section");
      side.className = "side card";
      side.dataset.side = number;
      side.setAttribute("aria-label", model);
      side.append(Object.assign(document.createElement("h2"), { textContent: model }));
      number === "1" ? box.prepend(side) : box.append(side);
    }
  }
  return [...box.children];
}

async function send(event) {
  event.preventDefault();
  if (running || !form.reportValidity()) return;
  running = new AbortController();
  const body = [...new FormData(form)];
  const message = form.elements.message.value;
  form.elements.message.value = "";
  const stop = document.getElementById("stop");
  const began = Date.now();
  const waiting = document.getElementById("waiting");
  stop.hidden = false;
  const clock = setInterval(() => {
    waiting.textContent = `${Math.round((Date.now() - began) / 1000)} s`;
  }, 1000);
  try {
    await Promise.all(sides().map((side) => answer(side, body, message, running.signal)));
  } finally {
    clearInterval(clock);
    waiting.textContent = "";
    stop.hidden = true;
    running = null;
    form.elements.message.focus();
  }
}

if (form) {
  form.addEventListener("submit", send);
  form.elements.message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  document.getElementById("stop").addEventListener("click", () => running?.abort());
}
