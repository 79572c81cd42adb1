"use strict";
// Loads the page again while its run goes on; who reads an older state can keep it.

const AGAIN = 5000; // milliseconds
const { live } = JSON.parse(document.getElementById("data").textContent);
const box = document.querySelector("#follow input");

function follow() {
  sessionStorage.setItem("follow", box.checked ? "yes" : "no");
  if (box.checked) setTimeout(() => box.checked && location.reload(), AGAIN);
}

if (live) {
  box.checked = sessionStorage.getItem("follow") !== "no";
  if (sessionStorage.getItem("focused")) box.focus();
  addEventListener("pagehide", () => sessionStorage.setItem("focused", document.activeElement === box ? "yes" : ""));
  box.addEventListener("change", follow);
  follow();
}
