// Live parts of a page, copy buttons, and the choice of runs to compare.
"use strict";
document.documentElement.classList.add("js");

// Make `old` like `fresh` and keep equal nodes, so that focus and choices stay.
function morph(old, fresh) {
  if (old.isEqualNode(fresh)) return;
  const kept = [...old.childNodes], made = [...fresh.childNodes];
  if (old.nodeName !== fresh.nodeName || old.nodeType !== Node.ELEMENT_NODE || kept.length !== made.length) {
    old.replaceWith(fresh);
    return;
  }
  const opened = old.nodeName === "DETAILS" && old.open; // by the reader
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  if (opened) old.open = true;
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  kept.forEach((child, index) => morph(child, made[index]));
}

function putParts(parts) {
  for (const [id, html] of Object.entries(parts)) {
    const template = document.createElement("template");
    template.innerHTML = html.trim();
    const old = document.getElementById(id);
    if (old && template.content.firstElementChild) morph(old, template.content.firstElementChild);
  }
}

// One stream per visible page: a browser opens only six connections to a server.
const stream = {
  source: null, timer: 0, cursor: "", wait: 1000,
  address() {
    const board = document.querySelector("[data-live-at]");
    if (board) return `${board.dataset.liveAt}?after=${this.cursor || board.dataset.cursor}`;
    const table = document.querySelector("[data-live-runs]");
    if (!table) return "";
    const ids = [...table.querySelectorAll("[data-live]")].slice(0, 200).map((row) => `run=${encodeURIComponent(row.dataset.live)}`);
    return `/live/runs?total=${table.dataset.liveRuns}&${ids.join("&")}`;
  },
  open() {
    this.close();
    const address = this.address();
    if (!address || document.hidden) return;
    const source = this.source = new EventSource(address);
    source.addEventListener("open", () => { this.wait = 1000; this.tell(""); });
    source.addEventListener("signed-out", () => { this.close(); location.reload(); });
    source.addEventListener("changes", (event) => {
      this.cursor = event.lastEventId;
      const { parts, points } = JSON.parse(event.data);
      putParts(parts);
      document.dispatchEvent(new CustomEvent("points", { detail: points }));
    });
    source.addEventListener("error", () => this.retry());
  },
  close() {
    clearTimeout(this.timer);
    if (this.source) this.source.close();
    this.source = null;
  },
  retry() {
    this.close();
    this.tell("The gateway does not answer. The page shows its last values and tries again.");
    this.timer = setTimeout(async () => {
      this.wait = Math.min(2 * this.wait, 10000);
      const answer = await fetch(location.href, { method: "HEAD" }).catch(() => null);
      if (answer && answer.redirected) location.reload(); // signed out
      else if (answer && answer.ok) {
        this.tell("This page gets no changes now, perhaps because too many pages are open. It tries again.");
        this.open();
      }
      else this.retry();
    }, this.wait);
  },
  tell(text) {
    const notice = document.getElementById("connection");
    notice.textContent = text;
    notice.hidden = !text;
  },
};
document.addEventListener("visibilitychange", () => stream.open());
document.addEventListener("htmx:afterSwap", () => stream.open());
addEventListener("pagehide", () => stream.close());
addEventListener("pageshow", () => stream.open());

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = "Copied";
  } catch { // without HTTPS there is no clipboard
    const field = Object.assign(document.createElement("input"), { value: button.dataset.copy, readOnly: true, size: 40 });
    field.setAttribute("aria-label", "Copy this");
    button.replaceWith(field);
    field.select();
    return;
  }
  setTimeout(() => { button.textContent = label; }, 1500);
});

function countChosen() {
  const button = document.querySelector("#compare button");
  if (!button) return;
  const count = document.querySelectorAll(".pick input:checked").length;
  button.disabled = count < 2 || count > 8;
  button.textContent = count < 2 ? "Choose runs to compare" : `Compare ${count} runs`;
}
document.addEventListener("change", countChosen);
document.addEventListener("htmx:afterSwap", countChosen);
countChosen();
