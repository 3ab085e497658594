// The page of `rescene serve`. Texts of the model are put in as text, never as HTML.
"use strict";
const MOST_SHOWN = 20, TOP = 5;
const $ = id => document.getElementById(id);
let model = null, queue = Promise.resolve();

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function percent(share) {
  return share >= 0.0995 || share === 0 ? `${(100 * share).toFixed(0)} %` : `${(100 * share).toFixed(1)} %`;
}

function bar(share, chance) {
  const svg = "http://www.w3.org/2000/svg", made = document.createElementNS(svg, "svg");
  made.setAttribute("class", "bar");
  made.setAttribute("viewBox", "0 0 100 10");
  made.setAttribute("preserveAspectRatio", "none");
  made.setAttribute("aria-hidden", "true");
  for (const [name, width] of [["", 100], ["value", 100 * share]]) {
    const rect = document.createElementNS(svg, "rect");
    rect.setAttribute("class", name);
    rect.setAttribute("width", width);
    rect.setAttribute("height", 10);
    made.append(rect);
  }
  const line = document.createElementNS(svg, "line");
  for (const [key, value] of Object.entries({ x1: 100 * chance, x2: 100 * chance, y1: 0, y2: 10 })) line.setAttribute(key, value);
  made.append(line);
  return made;
}

function listed(names, most) {
  return names.slice(0, most).join(", ") + (names.length > most ? ` and ${names.length - most} more` : "");
}

function showModel(found) {
  model = found;
  $("name").textContent = `${found.name}`;
  $("summary").textContent = `This model knows ${found.classes.length} classes: ${listed(found.classes, 8)}.`;
  $("limit").textContent = `up to ${(found.max_bytes / 2 ** 20).toPrecision(2)} MB`;
  $("version").textContent = `Served by rescene ${found.rescene}.`;
  const accuracy = found.accuracy_percent === null ? "not told" : `${found.accuracy_percent.toFixed(1)} % of its test images named rightly`;
  const facts = {
    "accuracy": accuracy,
    "chance level": `${found.chance_percent.toFixed(1)} % (one of ${found.classes.length} classes, guessed)`,
    "made from": found.made_from,
    "looks through": found.lens ? found.lens.name : "no lens: the network sees the pixels",
    "network": `${found.network}; sees pictures as ${found.picture_size} x ${found.picture_size} pixels, cut to a square`,
    "privacy": found.privacy || "not told: take it for not private",
  };
  for (const [key, value] of Object.entries(facts)) $("facts").append(element("dt", key), element("dd", value));
  for (const name of found.classes) $("classes").append(element("li", name));
  $("about").hidden = false;
}

function card(file) {
  const made = element("article", "", "card answer"), figure = element("figure"), image = element("img");
  image.alt = "";
  image.src = URL.createObjectURL(file);
  image.addEventListener("error", () => image.remove());  // a picture that this browser cannot show
  figure.append(image, element("figcaption", file.name || "pasted picture"));
  made.append(figure, element("div", "Looking …", "muted"));
  $("answers").prepend(made);
  while ($("answers").childElementCount > MOST_SHOWN) {
    const last = $("answers").lastElementChild, picture = last.querySelector("img");
    if (picture) URL.revokeObjectURL(picture.src);
    last.remove();
  }
  return made;
}

function told(error) {
  const made = element("div", "", "error");
  made.append(element("p", `${error.what}${error.why ? `: ${error.why}` : ""} [${error.code}]`));
  if (error.fix) made.append(element("p", error.fix, "muted small"));
  return made;
}

function guesses(found) {
  const made = element("div");
  found.top.forEach((one, place) => {
    const row = element("div", "", place === 0 ? "guess first" : "guess");
    row.append(element("span", one.class), element("span", percent(one.confidence)), bar(one.confidence, found.chance));
    made.append(row);
  });
  made.append(element("p", `The mark on each bar is chance, ${percent(found.chance)}.`, "muted small"));
  return made;
}

async function ask(file) {
  const place = card(file);
  let shown;
  try {
    if (model && file.size > model.max_bytes) throw { code: "E283", what: "the file is too large", fix: `at most ${model.max_bytes.toLocaleString("en")} bytes` };
    const answer = await fetch(`api/predict?top=${TOP}`, { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } });
    const found = await answer.json();
    shown = answer.ok ? guesses(found) : told(found.error);
  } catch (problem) {
    shown = told(problem.code ? problem : { code: "no answer", what: "the service does not answer", fix: "Is it still running? Reload this page." });
  }
  place.lastElementChild.replaceWith(shown);
}

function take(files) {
  for (const file of files) queue = queue.then(() => ask(file));
}

$("file").addEventListener("change", event => { take([...event.target.files]); event.target.value = ""; });
document.addEventListener("dragover", event => { event.preventDefault(); document.body.classList.add("over"); });
document.addEventListener("dragleave", event => { if (!event.relatedTarget) document.body.classList.remove("over"); });
document.addEventListener("drop", event => {
  event.preventDefault();
  document.body.classList.remove("over");
  take([...event.dataTransfer.files]);
});
document.addEventListener("paste", event => take([...event.clipboardData.files]));
fetch("api/model").then(answer => answer.json()).then(found => found.error ? Promise.reject(found.error) : showModel(found)).catch(() => {
  $("summary").textContent = "The service does not answer. Is it still running?";
});
