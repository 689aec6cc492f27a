"use strict";
(() => {
  // Theme: the system's until the button is pressed; a page opened from disk may not have storage.
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const stored = (value) => {
    try {
      if (value) localStorage.setItem("holdfast-theme", value);
      return localStorage.getItem("holdfast-theme");
    } catch { return null; }
  };
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
  const show = () => { button.textContent = dark() ? "Light" : "Dark"; };
  const kept = stored();
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    stored(root.dataset.theme);
    show();
  });
  system.addEventListener("change", show);
  show();

  // Sorting: numbers as numbers, missing values last in either direction.
  const value = (row, index) => row.cells[index].dataset.sort;
  const compare = (a, b) => {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  };
  for (const head of document.querySelectorAll("th[aria-sort]")) {
    head.querySelector("button").addEventListener("click", () => {
      const table = head.closest("table"), body = table.tBodies[0], index = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.querySelectorAll("th[aria-sort]")) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows];
      const known = rows.filter((row) => value(row, index) !== undefined);
      const unknown = rows.filter((row) => value(row, index) === undefined);
      known.sort((a, b) => compare(value(a, index), value(b, index)) * (down ? -1 : 1));
      body.append(...known, ...unknown);
    });
  }

  // Contents: folded away where they would fill a small screen.
  const contents = document.querySelector("nav details");
  if (matchMedia("(max-width: 70rem)").matches) contents.open = false;
})();
