// Filters choose rows, a column title sorts them. The choice stands in the address, so a link keeps it. Nothing is fetched.
"use strict";
const table = document.querySelector("table.board"), body = table.tBodies[0], rows = [...body.rows];
const form = document.querySelector("form.filters"), shown = document.querySelector("output");
const choose = () => {
  const wanted = [...form.elements].filter((field) => field.name && field.value);
  let num = 0;
  for (const row of rows) {
    const fits = wanted.every((field) =>
      field.name === "text" ? row.textContent.toLowerCase().includes(field.value.toLowerCase()) : row.dataset[field.name] === field.value);
    row.hidden = !fits;
    num += fits;
  }
  shown.value = `${num} of ${rows.length} rows`;
  const told = new URLSearchParams(wanted.map((field) => [field.name, field.value]));
  history.replaceState(null, "", wanted.length ? `#${told}` : location.pathname + location.search);
};
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  const field = form.elements[name];
  if (field) field.value = value;
}
form.hidden = false;
form.addEventListener("input", choose);
form.addEventListener("reset", () => setTimeout(choose));
form.addEventListener("submit", (event) => event.preventDefault());
[...table.tHead.rows[0].cells].forEach((head, column) => {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
  button.addEventListener("click", () => {
    const numeric = rows.every((row) => value(row) === "" || Number.isFinite(Number(value(row))));
    const before = head.getAttribute("aria-sort"), down = before ? before === "ascending" : numeric;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    rows.sort((one, two) => {
      const a = value(one), b = value(two);
      if (a === "" || b === "") return (a === "") - (b === "");
      return (numeric ? a - b : a.localeCompare(b, "en", { numeric: true })) * (down ? -1 : 1);
    });
    body.append(...rows);
  });
});
choose();
