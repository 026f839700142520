// A link of `tandem up` carries a code in its fragment, which no server or log sees.
"use strict";
function useCode() {
  const found = location.hash.match(/^#code=([\w.-]+)$/);
  if (!found) return;
  history.replaceState(null, "", location.pathname + location.search);
  const form = document.querySelector("form.sign-in");
  form.elements.code.disabled = false;
  form.elements.code.value = found[1];
  form.elements.key.disabled = true;
  form.submit();
}
addEventListener("hashchange", useCode);
useCode();
