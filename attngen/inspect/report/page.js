// The links between the columns. A line is named by its column and its number, from 1. A chain is the lines of CUDA that an
// instruction came from: the line itself, then the calls that it was inlined through.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const NAMES = { spec: "spec", cuda: "CUDA", sass: "SASS", ptx: "PTX" };
const COLUMNS = Object.keys(NAMES);
const lists = {}, rows = {}, active = {}; // a level of comments may lack a line: its place in `rows` is empty then
let level = "brief", notes = []; // of the CUDA: the level of comments, and the rows that only this level has
let pinned = null; // {column, line}, {kind} or {text}: what was clicked or searched
let marked = {}; // by column: {line: "strong" or "weak"}

// ---- indices ----

const chainOf = (column, line) => data.chains[data.places[column][line - 1]];

function push(map, key, value) {
  if (!map.has(key)) map.set(key, []);
  map.get(key).push(value);
}

const cudaOfSpec = new Map(); // spec line -> CUDA lines
for (const [line, numbers] of Object.entries(data.specOfCuda)) for (const n of numbers) push(cudaOfSpec, n, Number(line));
const madeOf = { sass: new Map(), ptx: new Map() }; // CUDA line -> machine lines that are of it
const calledFrom = { sass: new Map(), ptx: new Map() }; // CUDA line -> machine lines that were inlined there
for (const column of ["sass", "ptx"])
  data.places[column].forEach((place, i) => {
    data.chains[place].forEach((line, depth) => push((depth ? calledFrom : madeOf)[column], line, i + 1));
  });
const sassOfPtx = new Map();
data.ptxOfSass.forEach((line, i) => line && push(sassOfPtx, line, i + 1));

// ---- what a line is linked with ----

function linked(column, line) {
  const found = { spec: new Map(), cuda: new Map(), sass: new Map(), ptx: new Map() };
  const mark = (name, numbers, how) => {
    for (const n of numbers || []) if (!(how === "weak" && found[name].has(n))) found[name].set(n, how);
  };
  const machine = (cuda, called) => {
    for (const name of ["sass", "ptx"]) {
      mark(name, madeOf[name].get(cuda), "strong");
      mark(name, calledFrom[name].get(cuda), called);
    }
  };
  mark(column, [line], "strong");
  if (column === "spec") {
    for (const cuda of cudaOfSpec.get(line) || []) {
      mark("cuda", [cuda], "strong");
      machine(cuda, "strong");
    }
  } else if (column === "cuda") {
    mark("spec", data.specOfCuda[line], "strong");
    machine(line, "weak");
  } else {
    const chain = chainOf(column, line);
    chain.forEach((cuda, depth) => {
      mark("cuda", [cuda], depth ? "weak" : "strong");
      mark("spec", data.specOfCuda[cuda], "strong");
    });
    if (column === "sass") mark("ptx", [data.ptxOfSass[line - 1]].filter(Boolean), "strong");
    else mark("sass", sassOfPtx.get(line), "strong");
  }
  return found;
}

function ofClass(kind) {
  const found = { spec: new Map(), cuda: new Map(), sass: new Map(), ptx: new Map() };
  data.classOfSass.forEach((k, i) => {
    if (k !== kind) return;
    found.sass.set(i + 1, "strong");
    if (data.ptxOfSass[i]) found.ptx.set(data.ptxOfSass[i], "strong");
    chainOf("sass", i + 1).slice(0, 1).forEach((line) => found.cuda.set(line, "strong"));
  });
  return found;
}

// Lines that contain a text, whatever the case.
function containing(text) {
  const found = {}, wanted = text.toLowerCase(), has = (row) => row.querySelector("code").textContent.toLowerCase().includes(wanted);
  for (const column of COLUMNS) {
    found[column] = new Map();
    rows[column].forEach((row, i) => has(row) && found[column].set(i + 1, "strong"));
  }
  return found;
}

// ---- showing it ----

function show(found) {
  for (const column of COLUMNS) {
    for (const row of lists[column].querySelectorAll(".strong, .weak")) row.classList.remove("strong", "weak");
    for (const [n, how] of found[column] || []) rows[column][n - 1]?.classList.add(how);
    const count = found[column] ? found[column].size : 0;
    document.getElementById(`${column}-found`).textContent = count ? `${count} marked` : "";
  }
  marked = found;
  COLUMNS.forEach(overview);
}

function lineOf(node) {
  const row = node.closest && node.closest(".line");
  return row && row.id && { column: row.id.split("-")[0], line: Number(row.dataset.n) };
}

const foundBy = (pin) =>
  pin === null ? {} : pin.text !== undefined ? containing(pin.text) : pin.kind !== undefined ? ofClass(pin.kind) : linked(pin.column, pin.line);

function pin(what, scrolled = true) {
  pinned = what;
  show(foundBy(what));
  for (const button of document.querySelectorAll("button.class"))
    button.setAttribute("aria-pressed", String(what !== null && what.kind === Number(button.dataset.class)));
  if (what !== null && scrolled)
    for (const column of COLUMNS) if (column !== what.column) reveal(column);
  tell();
}

// The first marked line of a column, where none of them is seen already.
function reveal(column) {
  const list = lists[column], there = [...(marked[column] || [])].filter(([n]) => rows[column][n - 1]);
  const numbers = there.sort((a, b) => (a[1] > b[1]) - (a[1] < b[1]) || a[0] - b[0]);
  const strong = numbers.filter(([, how]) => how === "strong"), wanted = (strong.length ? strong : numbers).map(([n]) => n);
  if (!wanted.length) return;
  const seen = (n) => {
    const top = rows[column][n - 1].offsetTop - list.scrollTop;
    return top >= 0 && top < list.clientHeight - 20;
  };
  if (!wanted.some(seen)) list.scrollTop = rows[column][wanted[0] - 1].offsetTop - list.clientHeight / 3;
}

function tell() {
  const status = document.getElementById("status");
  if (pinned === null) return void (status.textContent = "Click a line to trace it.");
  const what = pinned.text !== undefined ? `"${pinned.text}"` : pinned.kind !== undefined ? data.classes[pinned.kind] : `${NAMES[pinned.column]} ${pinned.line}`;
  const others = COLUMNS.filter((column) => column !== pinned.column && marked[column].size);
  status.textContent = `${what}: ${others.map((column) => `${marked[column].size} ${NAMES[column]}`).join(", ") || "no other line"}`;
}

function overview(column) {
  const canvas = document.getElementById(`${column}-overview`), pen = canvas.getContext("2d");
  const height = lists[column].scrollHeight, tick = Math.max(2, canvas.height / rows[column].length), colors = getComputedStyle(canvas);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  if (lists[column].scrollHeight <= lists[column].clientHeight) return;
  pen.fillStyle = colors.getPropertyValue("--tick");
  for (const [n, how] of marked[column] || []) {
    if (!rows[column][n - 1]) continue;
    pen.globalAlpha = how === "strong" ? 1 : 0.45;
    pen.fillRect(0, (rows[column][n - 1].offsetTop / height) * canvas.height, canvas.width, tick);
  }
}

// ---- the lines ----

function fill(column) {
  const list = document.getElementById(`${column}-lines`), other = column === "cuda" ? data.levels[level] : undefined;
  const lines = other ? other.lines : data.columns[column];
  const html = lines.map((text, i) => {
    const n = other ? other.brief[i] : i + 1, made = column === "cuda" ? data.instructions[n] : 0;
    if (!n) return `<div class="line${text ? " note" : ""}"><span class="n"></span><span class="made"></span><code>${text || " "}</code></div>`;
    const kind = column === "sass" && data.classOfSass[i] >= 0 ? ` class-${data.classOfSass[i]}` : "";
    const count = made ? `<span class="made" title="${made} SASS instructions">${made}</span>` : column === "cuda" ? '<span class="made"></span>' : "";
    return `<div class="line${kind}" role="option" id="${column}-${n}" data-n="${n}"><span class="n">${n}</span>${count}<code>${text || " "}</code></div>`;
  });
  list.innerHTML = `<div class="sheet" role="presentation">${html.join("")}</div>`;
  lists[column] = list;
  rows[column] = [];
  for (const row of list.firstChild.children) {
    if (row.id) rows[column][Number(row.dataset.n) - 1] = row;
    const code = row.querySelector("code"), indent = code.textContent.match(/^\s*(\/\/\s*)?/)[0].length;
    code.style.setProperty("--indent", `${indent + 2}ch`); // of what a line that is too long is broken into
  }
  if (column === "cuda") notes = list.querySelectorAll(".note");
}

function listen(column) {
  const list = lists[column];
  active[column] = 1;
  list.addEventListener("mouseover", (event) => {
    const at = lineOf(event.target);
    if (at && pinned === null) show(linked(at.column, at.line));
  });
  list.addEventListener("mouseleave", () => pinned === null && show({}));
  list.addEventListener("click", (event) => {
    const at = lineOf(event.target);
    if (at) go(at.column, at.line);
  });
  list.addEventListener("keydown", (event) => key(event, column));
  list.addEventListener("focus", () => current(column, active[column]));
}

// The nearest line that the level of comments has, in the direction of `step`, else in the other one.
function there(column, line, step = 1) {
  const lines = rows[column], all = lines.flatMap((_, i) => [i + 1]);
  if (lines[line - 1]) return line;
  const after = all.find((n) => n > line), before = all.findLast((n) => n < line);
  return step > 0 ? (after ?? before) : (before ?? after);
}

function current(column, line) {
  for (const row of lists[column].querySelectorAll(".current")) row.classList.remove("current"), row.removeAttribute("aria-selected");
  const row = rows[column][line - 1];
  row.classList.add("current");
  row.setAttribute("aria-selected", "true");
  lists[column].setAttribute("aria-activedescendant", row.id);
  active[column] = line;
}

function go(column, wanted, step = 1) {
  const line = there(column, wanted, step);
  current(column, line);
  const row = rows[column][line - 1], list = lists[column];
  if (row.offsetTop < list.scrollTop) list.scrollTop = row.offsetTop;
  const below = row.offsetTop + row.offsetHeight - list.clientHeight;
  if (below > list.scrollTop) list.scrollTop = below;
  pin({ column, line });
}

function key(event, column) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const last = rows[column].length, page = Math.max(1, Math.floor(lists[column].clientHeight / 18) - 1);
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -last, End: last, Enter: 0, " ": 0 };
  let line = active[column];
  if (event.key in steps) line += steps[event.key];
  else if (event.key === "n" || event.key === "p") {
    const numbers = [...(marked[column] || new Map()).keys()].filter((n) => rows[column][n - 1]).sort((a, b) => a - b);
    const next = event.key === "n" ? numbers.find((n) => n > line) : numbers.reverse().find((n) => n < line);
    if (next !== undefined) {
      current(column, next);
      rows[column][next - 1].scrollIntoView({ block: "nearest" });
    }
    return void event.preventDefault();
  } else return;
  event.preventDefault();
  go(column, Math.min(Math.max(line, 1), last), line - active[column]);
}

// ---- another schedule beside this one ----

const CONTEXT = 3;

// The rows of a comparison; a number stands for so many unchanged ones that are far from any change.
function folded(lines, whole) {
  const isSame = ([a, b, moved]) => a && b && !moved && sameText(a, b);
  const mine = data.columns.cuda.map(plain), its = data.beside[chosen()].lines.map(plain);
  const sameText = (a, b) => mine[a - 1] === its[b - 1];
  const near = lines.map(isSame).map((same, i, all) => whole || !same || all.slice(Math.max(0, i - CONTEXT), i + CONTEXT + 1).includes(false));
  const found = [];
  lines.forEach((row, i) => {
    const alone = near[i - 1] !== false && near[i + 1] !== false; // one line takes no more room than the note that it is left out
    if (near[i] || alone) found.push({ row, same: isSame(row) });
    else if (found.length && found.at(-1).hidden) found.at(-1).hidden += 1;
    else found.push({ hidden: 1 });
  });
  return found;
}

const plain = (html) => html.replace(/<[^>]*>/g, "").replace(/\s+/g, " ").trim();
const chosen = () => Number(document.getElementById("beside").value);

function side(lines, number, kind) {
  const text = number ? lines[number - 1] || " " : "";
  return `<div class="${number ? kind : "none"}"><span class="n">${number || ""}</span><code>${text}</code></div>`;
}

function compare() {
  const list = document.getElementById("diff"), choice = document.getElementById("beside").value;
  list.hidden = choice === "";
  if (choice === "") return;
  const other = data.beside[chosen()];
  const html = folded(other.rows, document.getElementById("whole").checked).map(({ row, same, hidden }) => {
    if (hidden) return `<p class="fold">${hidden} lines unchanged</p>`;
    const [a, b, moved] = row, kind = same ? "same" : moved ? "moved" : a && b ? "changed" : a ? "left" : "right";
    return side(data.columns.cuda, a, kind) + side(other.lines, b, kind);
  });
  list.innerHTML = html.join("");
  for (const code of list.querySelectorAll("code"))
    code.style.setProperty("--indent", `${code.textContent.match(/^\s*(\/\/\s*)?/)[0].length + 2}ch`);
  document.getElementById("diff-says").textContent = other.says;
}

// ---- the rest of the page ----

COLUMNS.forEach(fill);
COLUMNS.forEach(listen);
tell();
const search = document.getElementById("search");
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.ctrlKey && !event.metaKey && document.activeElement !== search) {
    event.preventDefault();
    return search.focus();
  }
  if (event.key !== "Escape") return;
  search.value = "";
  pin(null);
  help(false);
});
search.addEventListener("input", () => pin(search.value.trim() ? { text: search.value.trim() } : null));
search.addEventListener("keydown", (event) => {
  const column = COLUMNS.find((name) => marked[name] && marked[name].size);
  if (event.key !== "Enter" || pinned === null || !column) return;
  event.preventDefault();
  lists[column].focus();
  const first = Math.min(...marked[column].keys());
  current(column, first);
  rows[column][first - 1].scrollIntoView({ block: "nearest" });
});
document.getElementById("comments").addEventListener("change", (event) => {
  level = event.target.value;
  const at = active.cuda;
  fill("cuda");
  current("cuda", there("cuda", at));
  show(foundBy(pinned));
  rows.cuda[active.cuda - 1].scrollIntoView({ block: "nearest" });
});
for (const button of document.querySelectorAll("button.expand"))
  button.addEventListener("click", () => {
    const grid = document.getElementById("code"), only = grid.dataset.only === button.dataset.column ? "" : button.dataset.column;
    grid.dataset.only = only;
    for (const each of document.querySelectorAll("button.expand")) each.setAttribute("aria-pressed", String(each.dataset.column === only));
    COLUMNS.forEach(overview);
  });
document.getElementById("beside").addEventListener("change", compare);
document.getElementById("whole").addEventListener("change", compare);
for (const button of document.querySelectorAll("button.go"))
  button.addEventListener("click", () => {
    document.getElementById("code").scrollIntoView();
    lists[button.dataset.column].focus({ preventScroll: true });
    go(button.dataset.column, Number(button.dataset.line));
  });
for (const button of document.querySelectorAll("button.class"))
  button.addEventListener("click", () => {
    const kind = Number(button.dataset.class);
    pin(pinned !== null && pinned.kind === kind ? null : { kind });
  });

function help(open) {
  document.getElementById("help").hidden = !open;
  document.getElementById("help-button").setAttribute("aria-expanded", String(open));
}
document.getElementById("help-button").addEventListener("click", () => help(document.getElementById("help").hidden));

const root = document.documentElement, theme = document.getElementById("theme");
function shade(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  theme.textContent = dark ? "Light" : "Dark";
  COLUMNS.forEach(overview);
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
shade(prefersDark.matches);
prefersDark.addEventListener("change", (event) => shade(event.matches));
theme.addEventListener("click", () => shade(root.dataset.theme !== "dark"));

// The page opens with what the mask became; without a mask, with the score.
const opening = ["mask", "score"].map((word) => data.columns.spec.findIndex((text) => plain(text).trim().startsWith(`${word} `)) + 1);
const opened = opening.find((line) => line > 0 && cudaOfSpec.has(line));
if (opened) pin({ column: "spec", line: opened });
