// The theme: the system's, light or dark. This is no module, so that it runs before the page is drawn.
{
  const KEY = "theme";
  const root = document.documentElement;
  root.dataset.theme = localStorage.getItem(KEY) ?? "system";

  document.addEventListener("DOMContentLoaded", () => {
    for (const radio of document.querySelectorAll("#theme input")) {
      radio.checked = radio.value === root.dataset.theme;
      radio.addEventListener("change", () => {
        root.dataset.theme = radio.value;
        localStorage.setItem(KEY, radio.value);
      });
    }
  });
}
