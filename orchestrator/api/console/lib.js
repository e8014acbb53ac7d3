// Preact with htm: components are functions, markup is a tagged template. No build step.
import { h, render, Fragment } from "./vendor/preact.js";
import { useState, useEffect, useMemo, useRef, useCallback } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export { h, render, Fragment, useState, useEffect, useMemo, useRef, useCallback };

// A value that components share: `useStore` renders again when it changes.
export function store(value) {
  const listeners = new Set();
  return {
    get: () => value,
    set(next) {
      if (Object.is(next, value)) return;
      value = next;
      for (const listen of [...listeners]) listen(value);
    },
    listen(call) {
      listeners.add(call);
      return () => listeners.delete(call);
    },
  };
}

export function useStore(shared) {
  const [value, setValue] = useState(shared.get());
  useEffect(() => {
    setValue(shared.get());
    return shared.listen(setValue);
  }, [shared]);
  return value;
}
