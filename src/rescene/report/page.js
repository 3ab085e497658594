// Click a column title to sort its table; again to turn it round. A link into a folded section opens it. Nothing is fetched.
"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const rows = [...body.rows], missing = (text) => text === "" || text === "–";
      const known = rows.map((row) => value(row, column)).filter((text) => !missing(text));
      const numeric = known.every((text) => text !== "" && Number.isFinite(Number(text)));
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numeric;  // figures start with the largest, words with A
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const order = (a, b) => (numeric ? a - b : a.localeCompare(b, "en", { numeric: true })) * (down ? -1 : 1);
      rows.sort((one, two) => {
        const a = value(one, column), b = value(two, column);
        return missing(a) - missing(b) || (missing(a) ? 0 : order(a, b));
      });
      body.append(...rows);
    });
  });
}
const unfold = () => {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!place) return;
  const inside = place.querySelector(":scope > details.fold");
  if (inside) inside.open = true;
  for (let box = place.closest("details"); box; box = box.parentElement.closest("details")) box.open = true;
  place.scrollIntoView();
};
addEventListener("hashchange", unfold);
if (location.hash) unfold();
