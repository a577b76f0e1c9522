"use strict";
(() => {
  let all = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("explorer");
  const isText = all[0].text;
  const sheet = document.getElementById("frames");  // pictures of some members of a group
  const pictured = sheet && { ...JSON.parse(sheet.dataset.of), image: sheet.src };
  const state = { group: 0, member: 0, cell: 0, order: "spread", shade: "advantage" };
  const everything = { iteration: "all", zero: "all", low: "", high: "" };
  Object.assign(state, everything);
  let shown = all;

  // text from the run is only ever set as textContent
  const make = (tag, attributes = {}, ...children) => {
    const svg = ["svg", "rect", "path", "line"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  };
  const at = (values, cell) => (values.length === 1 ? values[0] : values[cell]);
  const show = (value) => {
    if (value === null || value === undefined) return "–";
    if (Array.isArray(value)) return value.map(show).join(", ");
    return typeof value === "number" ? String(Number(value.toPrecision(4))) : String(value);
  };
  const name = (group) => `${group.iteration}-${group.group}`;
  const stepOf = (group, member, cell) => member.at?.[cell] ?? member.first + cell * group.stride;
  const cellOf = (group, member, step) => (member?.at ? member.at.findLastIndex((at) => at <= step) : Math.floor((step - (member?.first ?? 0)) / group.stride));
  const side = (value) => (value > 0 ? "more" : value < 0 ? "less" : "");
  const cells = (group, member) => Math.ceil(member.length / group.stride);
  const togo = (group, member) => {
    const out = new Array(cells(group, member));
    let sum = 0;
    for (let i = out.length - 1; i >= 0; i--) out[i] = sum += at(member.reward, i) ?? 0;
    return out;
  };
  const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 0);

  const filters = make("div", { class: "filters" });
  const list = make("ol", { class: "list", "aria-label": "Groups" });
  const view = make("div");
  root.replaceChildren(filters, make("div", { class: "explorer" }, list, view));

  const controls = {};
  const control = (label, key, tag, attributes, ...children) => {
    const change = (event) => { state[key] = event.target.value; filter(shown[state.group]); };
    controls[key] = make(tag, { ...attributes, onchange: change }, ...children);
    controls[key].value = state[key];
    return make("label", {}, `${label} `, controls[key]);
  };
  const choice = (label, key, options) =>
    control(label, key, "select", {}, ...options.map(([value, text]) => make("option", { value }, text)));
  const bound = (label, key) => control(label, key, "input", { type: "number", step: "any" });
  const score = isText ? "Reward" : "Return";
  filters.append(
    choice("Iteration", "iteration", []),
    bound(`${score} from`, "low"), bound("to", "high"),
    choice("Sort by", "order", [["spread", "spread"], ["return", "highest return"], ["iteration", "iteration"]]),
    choice("Show", "zero", [["all", "all groups"], ["some", "members that differ"], ["zero", "members that are equal"]]));
  if (isText) filters.append(choice("Shade by", "shade", [["advantage", "advantage"], ["ratio", "ratio"], ["log_prob", "log-probability"]]));

  const offerIterations = () => {
    const iterations = [...new Set(all.map((group) => group.iteration))].sort((a, b) => a - b).map(String);
    controls.iteration.replaceChildren(...["all", ...iterations].map((value) => make("option", { value }, value)));
    controls.iteration.value = state.iteration;
  };
  offerIterations();

  function filter(current) {
    const inside = ({ return: value }) => (state.low === "" || value >= Number(state.low)) && (state.high === "" || value <= Number(state.high));
    shown = all.filter((group) => (state.iteration === "all" || String(group.iteration) === state.iteration)
      && group.members.some(inside) && (state.zero === "all" || (state.zero === "zero") === (group.spread === 0)));
    const isPictured = (group) => name(group) === pictured?.group;
    const best = (group) => Math.max(...group.members.map((member) => member.return));
    const orders = { spread: (a, b) => b.spread - a.spread || isPictured(b) - isPictured(a), return: (a, b) => best(b) - best(a), iteration: (a, b) => a.iteration - b.iteration };
    shown.sort(orders[state.order]);
    state.group = Math.max(0, shown.indexOf(current));
    if (shown[state.group] !== current) state.member = state.cell = 0;
    draw();
  }

  function draw() {
    const focused = list.contains(document.activeElement);  // a button, which is replaced
    list.replaceChildren(...shown.map((group, index) => {
      const returns = group.members.map((member) => member.return);
      const text = `Iteration ${group.iteration}, group ${group.group}`;
      const range = `${show(Math.min(...returns))} to ${show(Math.max(...returns))}, spread ${show(group.spread)}${name(group) === pictured?.group ? ", with frames" : ""}${group.apart ? ", answers differ" : ""}`;
      return make("li", {}, make("button", { type: "button", "aria-current": String(index === state.group), onclick: () => go(index, 0, 0) },
        text, make("br"), make("span", { class: "quiet" }, range)));
    }));
    if (focused) (list.children[state.group]?.firstChild ?? root).focus();
    const group = shown[state.group];
    if (!group) {
      view.replaceChildren(make("p", {}, "No such groups. Choose other filters."));
      return;
    }
    const title = make("h3", {}, `Iteration ${group.iteration}, group ${group.group}: ${group.members.length} members`);
    const start = make("div", { class: "start" }, group.text ? group.start : `Start from seed ${group.start}`);
    const joined = ` A cell is ${group.stride} steps: rewards are summed, ratios and advantages averaged, the rest is that of the first.`;
    const read = group.text ? [] : [make("p", { class: "quiet" }, `Band: advantage. Line: return-to-go.${group.stride > 1 ? joined : ""}`)];
    if (group.apart) read.push(make("p", { class: "look" }, "Members that had written the same got different answers, so they do not share a start. The turns are marked."));
    const members = group.members.map((member, index) => (group.talks ? talk : group.text ? tokens : strip)(group, member, index));
    view.replaceChildren(title, ...(group.start ? [start] : []), ...read,
      make("div", { class: group.text ? "detail sticky" : "detail", "aria-live": "polite" }),
      ...(group.talks ? [make("div", { class: "talks" }, ...members)] : members));
    // only those are stops of the tabulator that scroll
    for (const text of view.querySelectorAll(".said, .told")) if (text.scrollHeight > text.clientHeight) text.tabIndex = 0;
    mark();
  }

  const head = (group, member, index) => make("header", {},
    make("strong", {}, `Member ${index}${member.greedy ? " (greedy)" : ""}: ${isText ? "reward" : "return"} ${show(member.return)}`),
    make("span", { class: "quiet" }, `${member.length} ${isText ? "token" : "step"}${member.length === 1 ? "" : "s"}, ${{ true: "won, ", false: "not won, " }[member.won] ?? ""}${member.end}`));

  function strip(group, member, index) {
    const width = Math.max(...group.members.map((other) => cells(group, other)));
    const count = cells(group, member), values = togo(group, member);
    const heights = [0, ...group.members.flatMap((other) => togo(group, other))];
    const low = heights.reduce((a, b) => Math.min(a, b)), high = heights.reduce((a, b) => Math.max(a, b));
    const strongest = largest(group.members.flatMap((other) => other.advantage)) || 1;
    const svg = make("svg", { viewBox: `0 0 ${width} 58`, preserveAspectRatio: "none", role: "img",
      "aria-label": `Member ${index}: advantage as a band, return-to-go as a line`,
      onclick: (event) => {
        const box = svg.getBoundingClientRect();
        go(state.group, index, Math.floor((event.clientX - box.left) / box.width * width));
      } });
    for (let i = 0; i < count; i++) {
      const advantage = at(member.advantage, i);
      if (advantage) svg.append(make("rect", { x: i, y: 0, width: 1.02, height: 14, style: `fill: ${color(advantage, strongest)}` }));
    }
    const height = (value) => 55 - 36 * (value - low) / (high - low || 1);
    const line = values.map((value, i) => `${i ? "L" : "M"}${i + 0.5} ${height(value)}`).join("");
    const stroke = "stroke: currentColor; vector-effect: non-scaling-stroke; fill: none;";
    svg.append(make("line", { x1: 0, x2: width, y1: height(0), y2: height(0), style: `${stroke} opacity: 0.3` }),
      make("path", { d: line, style: `${stroke} stroke-width: 1.5` }),
      make("line", { class: "cursor", y1: 0, y2: 58, style: `${stroke} stroke-width: 2; opacity: 0.7` }));
    const picture = frame(group, index);
    return make("div", { class: picture ? "member pictured" : "member" }, head(group, member, index), ...(picture ? [picture] : []), svg);
  }

  function frame(group, index) {
    if (pictured?.group !== name(group)) return null;
    const picture = make("div");  // room for it also where there is none: time is the same for all members
    picture.style.width = `${pictured.width}px`;
    if (pictured.members[index]) {
      Object.assign(picture.style, { height: `${pictured.height}px`, backgroundImage: `url(${pictured.image})` });
      picture.className = "frame";
      picture.setAttribute("role", "img");
    }
    return picture;
  }

  const color = (value, strongest) =>
    `rgba(var(--${value > 0 ? "more" : "less"}), ${(0.15 + 0.85 * Math.min(1, Math.abs(value) / strongest)).toFixed(2)})`;

  function talk(group, member, index) {
    const written = spans(group, member, index);
    const turns = member.turns.map((turn, number) => make("div", { class: "turn" },
      make("p", { class: "quiet" }, `Turn ${number + 1}: reward ${show(turn.reward)}, advantage `, make("span", { class: side(turn.advantage) }, show(turn.advantage))),
      make("div", { class: "tokens said" }, ...written.slice(turn.from, turn.to)),
      ...turn.calls.map((call) => make("p", { class: "quiet" }, `call: ${call}`)),
      ...(turn.apart ? [make("p", { class: "look" }, "Answered differently:")] : []),
      ...turn.answers.filter(({ text }) => text).map(({ role, text }) => make("div", { class: "told" }, make("span", { class: "quiet" }, `${role === "user" ? "environment" : role}: `), text))));
    const box = make("section", { class: "member talk", "aria-label": `Member ${index}` }, make("div", {}, head(group, member, index),
      ...(member.start ? [make("div", { class: "told" }, member.start)] : [])), ...turns);
    box.style.gridRow = `span ${1 + Math.max(...group.members.map((other) => other.turns.length))}`;  // so that turns are at one height
    return box;
  }

  function tokens(group, member, index) {
    return make("div", { class: "member" }, head(group, member, index), make("div", { class: "tokens" }, ...spans(group, member, index)));
  }

  function spans(group, member, index) {
    const shade = (other, i) => {
      const value = at(other[state.shade], i);
      if (value === null) return null;
      return state.shade === "ratio" ? Math.log(Math.max(value, 1e-3)) : value;
    };
    const strongest = largest(group.members.flatMap((other) => other.token.map((_, i) => shade(other, i)))) || 1;
    return member.token.map((text, i) => {
      const value = shade(member, i);
      const span = make("span", { onclick: () => go(state.group, index, i) }, text);
      if (!at(member.mask, i)) span.className = "masked";
      else if (value) span.style.background = color(value, strongest * 2);
      return span;
    });
  }

  function mark() {
    const group = shown[state.group];
    [...view.querySelectorAll(".member")].forEach((box, index) => {
      const chosen = index === state.member;
      box.classList.toggle("chosen", chosen);
      box.querySelectorAll(".tokens span").forEach((span, i) => span.classList.toggle("chosen", chosen && i === state.cell));
      const cursor = box.querySelector(".cursor");
      const picture = box.querySelector(".frame");
      if (picture) {
        const steps = pictured.members[index], step = state.cell * group.stride;
        const column = steps.findLastIndex((at) => at <= step), row = Object.keys(pictured.members).indexOf(String(index));
        picture.style.backgroundPosition = `-${column * pictured.width}px -${row * pictured.height}px`;
        picture.setAttribute("aria-label", `Member ${index} at step ${steps[column]}`);
      }
      if (cursor) for (const x of ["x1", "x2"]) cursor.setAttribute(x, state.cell + 0.5);
    });
    const detail = view.querySelector(".detail");
    detail.replaceChildren(group.text ? table(group, [state.member]) : table(group, group.members.keys()));
  }

  function table(group, members) {
    const known = ["action", "observation"].filter((key) => group.members[0][key]);
    const columns = ["member", "step", ...(group.text ? ["token"] : known), "reward", "return-to-go", "log-probability", "ratio", "advantage"];
    const rows = [...members].map((index) => {
      const member = group.members[index], i = state.cell;
      if (i >= cells(group, member)) return make("tr", {}, make("th", { scope: "row" }, String(index)), make("td", { colspan: columns.length - 1, class: "quiet" }, "over"));
      const advantage = at(member.advantage, i);
      const doing = group.text ? [JSON.stringify(member.token[i])] : known.map((key) => show(member[key][i]));
      const values = [show(stepOf(group, member, i)), ...doing, show(at(member.reward, i)), show(togo(group, member)[i]), show(at(member.log_prob, i)), show(at(member.ratio, i))];
      return make("tr", {}, make("th", { scope: "row" }, String(index)), ...values.map((text) => make("td", {}, text)),
        make("td", { class: side(advantage) }, show(advantage)));
    });
    const scrolls = { tabindex: "0", "aria-label": "The chosen step" };
    return make("table", scrolls, make("thead", {}, make("tr", {}, ...columns.map((text) => make("th", { scope: "col" }, text)))), make("tbody", {}, ...rows));
  }

  function go(group, member, cell) {
    const redraw = group !== state.group;
    state.group = Math.min(Math.max(group, 0), shown.length - 1);
    const members = shown[state.group].members;
    state.member = Math.min(Math.max(member, 0), members.length - 1);
    const most = Math.max(...members.map((other) => cells(shown[state.group], other)));
    state.cell = Math.min(Math.max(cell, 0), (isText ? cells(shown[state.group], members[state.member]) : most) - 1);
    if (redraw) draw(); else mark();
    if (shown[state.group].talks) view.querySelector(".tokens .chosen")?.scrollIntoView({ block: "nearest" });
    const step = stepOf(shown[state.group], members[state.member], state.cell);
    const here = location.href.split("#")[0];  // in a frame of a notebook, a fragment alone would be the notebook's
    history.replaceState(null, "", `${here}#group=${name(shown[state.group])}&member=${state.member}&step=${step}`);
  }

  root.addEventListener("keydown", (event) => {
    if (["SELECT", "INPUT", "SUMMARY", "TABLE"].includes(event.target.tagName) || event.target.matches(".said, .told") || event.ctrlKey || event.metaKey || event.altKey || !shown.length) return;
    const moves = { ArrowRight: [0, 0, 1], ArrowLeft: [0, 0, -1], ArrowDown: [0, 1, 0], ArrowUp: [0, -1, 0], PageDown: [1], PageUp: [-1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    if (move[0]) go(state.group + move[0], 0, 0);
    else go(state.group, state.member + move[1], state.cell + move[2]);
  });

  function follow() {
    const asked = new URLSearchParams(location.hash.slice(1));
    const group = all.find((one) => name(one) === asked.get("group"));
    if (!group) return;
    Object.assign(state, everything);
    for (const key of Object.keys(everything)) controls[key].value = state[key];
    filter(group);
    const member = Number(asked.get("member")) || 0;
    go(state.group, member, asked.has("step") ? cellOf(group, group.members[member], Number(asked.get("step")) || 0) : 0);
    root.scrollIntoView();
  }
  addEventListener("hashchange", follow);
  document.addEventListener("groups", (event) => {  // of a run that is followed
    const current = shown[state.group];
    all = event.detail;
    if (!all.some((group) => String(group.iteration) === state.iteration)) state.iteration = "all";
    offerIterations();
    filter(all.find((group) => current && name(group) === name(current)));
  });
  filter();
  follow();
})();
