"use strict";
// Sorts and filters tables, shows chart values at the pointer, and expands or collapses a complete tree.

for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.setAttribute("aria-sort", "none");
    head.querySelector("button").addEventListener("click", () => {
      const numeric = head.classList.contains("n");
      const before = head.getAttribute("aria-sort");
      const ascending = before === "none" ? !numeric : before === "descending";
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const key = (row) => {
        const cell = row.cells[column];
        const text = cell.dataset.v ?? cell.textContent;
        const number = text === "inf" ? Infinity : text === "-inf" ? -Infinity : Number(text);
        return text !== "" && !Number.isNaN(number) ? number : text.toLowerCase();
      };
      const rows = [...table.tBodies[0].rows].map((row) => [key(row), row]);
      rows.sort(([one], [other]) => {
        const order = typeof one === typeof other ? (one < other ? -1 : one > other ? 1 : 0)
          : typeof one === "number" ? -1 : 1;
        return ascending ? order : -order;
      });
      table.tBodies[0].append(...rows.map(([, row]) => row));
    });
  });
}

for (const input of document.querySelectorAll("input[data-filter]")) {
  const rows = input.closest("section").querySelector(`[aria-label="${input.dataset.filter}"] tbody`).rows;
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
}

for (const button of document.querySelectorAll("button[data-unfold]")) {
  const tree = button.parentElement.nextElementSibling;
  button.addEventListener("click", () => {
    for (const one of tree.querySelectorAll("details")) one.open = button.dataset.unfold === "true";
  });
}

for (const plot of document.querySelectorAll("[data-readings]")) {
  const readings = plot.dataset.readings.split("\n").filter(Boolean).map((line) => line.split("\t"));
  const at = readings.map(([place]) => Number(place));
  const output = plot.querySelector(".reading");
  let shown = at.length - 1;
  const show = (number) => {
    if (!at.length) return;
    shown = Math.max(0, Math.min(at.length - 1, number));
    const width = plot.clientWidth, place = at[shown] * width;
    output.textContent = readings[shown][1];
    output.hidden = false;
    const half = output.offsetWidth / 2;
    const middle = Math.max(half - 46, Math.min(width - half + 8, place));
    output.style.left = `${middle}px`;
    output.style.setProperty("--at", `${place - middle + half}px`);
  };
  const hide = () => { output.hidden = true; };
  plot.addEventListener("pointermove", (event) => {
    const place = (event.clientX - plot.getBoundingClientRect().left) / plot.clientWidth;
    let low = 0, high = at.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (at[middle] < place) low = middle + 1; else high = middle;
    }
    show(low > 0 && place - at[low - 1] < at[low] - place ? low - 1 : low);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("focus", () => show(shown));
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moved = { ArrowLeft: shown - 1, ArrowRight: shown + 1, Home: 0, End: at.length - 1 }[event.key];
    if (moved === undefined) return;
    event.preventDefault();
    show(moved);
  });
}
