// The links between the columns. A line is named by its column and its number, from 1. A chain is the lines of CUDA that an
// instruction came from: the line itself, then the calls that it was inlined through.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const NAMES = { spec: "spec", cuda: "CUDA", sass: "SASS", ptx: "PTX" };
const COLUMNS = Object.keys(NAMES);
const lists = {}, rows = {}, active = {};
let pinned = null; // {column, line} or {kind}: what was clicked
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
  const machine = (cuda, how) => {
    for (const name of ["sass", "ptx"]) {
      mark(name, madeOf[name].get(cuda), how);
      mark(name, calledFrom[name].get(cuda), "weak");
    }
  };
  mark(column, [line], "strong");
  if (column === "spec") {
    for (const cuda of cudaOfSpec.get(line) || []) {
      mark("cuda", [cuda], "strong");
      for (const name of ["sass", "ptx"]) {
        mark(name, madeOf[name].get(cuda), "strong");
        mark(name, calledFrom[name].get(cuda), "strong");
      }
    }
  } else if (column === "cuda") {
    mark("spec", data.specOfCuda[line], "strong");
    machine(line, "strong");
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

// ---- showing it ----

function show(found) {
  for (const column of COLUMNS) {
    for (const [n, how] of marked[column] || []) rows[column][n - 1].classList.remove(how);
    for (const [n, how] of found[column] || []) rows[column][n - 1].classList.add(how);
    const count = found[column] ? found[column].size : 0;
    document.getElementById(`${column}-found`).textContent = count ? `${count} marked` : "";
  }
  marked = found;
  COLUMNS.forEach(overview);
}

function lineOf(node) {
  const row = node.closest && node.closest(".line");
  return row && { column: row.id.split("-")[0], line: Number(row.dataset.n) };
}

const foundBy = (pin) => (pin === null ? {} : pin.kind === undefined ? linked(pin.column, pin.line) : ofClass(pin.kind));

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
  const list = lists[column], numbers = [...(marked[column] || new Map())].sort((a, b) => (a[1] > b[1]) - (a[1] < b[1]) || a[0] - b[0]);
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
  if (pinned === null) return void (status.textContent = "Click a line to see what it became.");
  const what = pinned.kind === undefined ? `${NAMES[pinned.column]} ${pinned.line}` : data.classes[pinned.kind];
  const others = COLUMNS.filter((column) => column !== pinned.column);
  status.textContent = `${what}: ${others.map((column) => `${marked[column].size} ${NAMES[column]}`).join(", ")}`;
}

function overview(column) {
  const canvas = document.getElementById(`${column}-overview`), pen = canvas.getContext("2d");
  const total = rows[column].length, tick = Math.max(2, canvas.height / total), colors = getComputedStyle(canvas);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  if (lists[column].scrollHeight <= lists[column].clientHeight) return;
  pen.fillStyle = colors.getPropertyValue("--tick");
  for (const [n, how] of marked[column] || []) {
    pen.globalAlpha = how === "strong" ? 1 : 0.45;
    pen.fillRect(0, ((n - 1) / total) * canvas.height, canvas.width, tick);
  }
}

// ---- the lines ----

function fill(column) {
  const list = document.getElementById(`${column}-lines`), lines = data.columns[column];
  const html = lines.map((text, i) => {
    const n = i + 1, made = column === "cuda" ? data.instructions[n] : 0;
    const kind = column === "sass" && data.classOfSass[i] >= 0 ? ` class-${data.classOfSass[i]}` : "";
    const count = made ? `<span class="made" title="${made} SASS instructions">${made}</span>` : column === "cuda" ? '<span class="made"></span>' : "";
    return `<div class="line${kind}" role="option" id="${column}-${n}" data-n="${n}"><span class="n">${n}</span>${count}<code>${text || " "}</code></div>`;
  });
  list.innerHTML = `<div class="sheet" role="presentation">${html.join("")}</div>`;
  lists[column] = list;
  rows[column] = [...list.firstChild.children];
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

function current(column, line) {
  for (const row of lists[column].querySelectorAll(".current")) row.classList.remove("current"), row.removeAttribute("aria-selected");
  const row = rows[column][line - 1];
  row.classList.add("current");
  row.setAttribute("aria-selected", "true");
  lists[column].setAttribute("aria-activedescendant", row.id);
  active[column] = line;
}

function go(column, line) {
  current(column, line);
  const row = rows[column][line - 1], list = lists[column];
  if (row.offsetTop < list.scrollTop) list.scrollTop = row.offsetTop;
  const below = row.offsetTop + row.offsetHeight - list.clientHeight;
  if (below > list.scrollTop) list.scrollTop = below;
  pin({ column, line });
}

function key(event, column) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const last = rows[column].length, page = Math.max(1, Math.floor(lists[column].clientHeight / rows[column][0].offsetHeight) - 1);
  const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -last, End: last, Enter: 0, " ": 0 };
  let line = active[column];
  if (event.key in steps) line += steps[event.key];
  else if (event.key === "n" || event.key === "p") {
    const numbers = [...(marked[column] || new Map()).keys()].sort((a, b) => a - b);
    const next = event.key === "n" ? numbers.find((n) => n > line) : numbers.reverse().find((n) => n < line);
    if (next !== undefined) {
      current(column, next);
      rows[column][next - 1].scrollIntoView({ block: "nearest" });
    }
    return void event.preventDefault();
  } else return;
  event.preventDefault();
  go(column, Math.min(Math.max(line, 1), last));
}

// ---- the rest of the page ----

COLUMNS.forEach(fill);
tell();
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  pin(null);
  help(false);
});
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
