'use strict';
(() => {
  const data = JSON.parse(document.getElementById('data').textContent);
  const ROW = 22, $ = (id) => document.getElementById(id);
  const list = $('list'), axis = $('axis'), tip = $('tip'), detail = $('detail');
  const all = data.requests, stages = data.stages;
  const end = Math.max(...all.map((r) => r.received + r.length), 1);
  const begin = Math.min(...all.map((r) => r.received), end - 1);
  const longest = Math.max(...all.map((r) => r.length), 1);
  let shown = all, chosen = -1, at = -1, own = false, from = begin, to = end, hot = 0;

  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const ms = (value) => {
    if (value === null || value === undefined) return '–';
    if (value >= 99.95) return Math.round(value).toLocaleString('en');
    return value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  };
  const share = (part, whole) => {
    if (!(whole > 0)) return '–';
    const percent = 100 * part / whole;
    if (percent > 0 && percent < .1) return '<0.1 %';
    return percent.toFixed(percent > 0 && percent < 9.95 ? 1 : 0) + ' %';
  };
  const origin = (r) => (own ? r.received : 0);

  /* --- rows: only those in sight exist --- */

  const spacer = list.appendChild(make('div'));
  const rows = new Map();

  function ticks() {
    const span = to - from, rough = span / 7, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    const found = [];
    for (let t = Math.ceil((from - (own ? 0 : begin)) / step) * step; t <= to - (own ? 0 : begin); t += step) {
      found.push([t, (t + (own ? 0 : begin) - from) / span]);
    }
    return [found, step];
  }

  function drawAxis() {
    const [found, step] = ticks();
    axis.replaceChildren(...found.map(([t, x]) => {
      const mark = make('span', '', step >= 1000 ? +(t / 1000).toFixed(3) + ' s' : +t.toFixed(4) + ' ms');
      mark.style.left = 100 * x + '%';
      return mark;
    }));
  }

  function drawRow(place) {
    const r = shown[place], row = make('div', 'row');
    row.style.top = place * ROW + 'px';
    row.id = 'row' + place;
    row.setAttribute('role', 'option');
    row.setAttribute('aria-selected', String(place === chosen));
    row.setAttribute('aria-label', `${r.id}, ${r.phase}, ${ms(r.length)} ms`);
    row.append(make('span', 'id', r.id), make('span', 'tokens', `${r.prompt ?? '–'}→${r.output}`));
    const bar = row.appendChild(make('div', 'bar')), span = to - from, shift = origin(r);
    for (const [, x] of ticks()[0]) bar.appendChild(make('u')).style.left = 100 * x + '%';
    r.bar.forEach(([stage, start, stop, waiting], number) => {
      const left = (start - shift - from) / span, right = (stop - shift - from) / span;
      if (right < 0 || left > 1) return;
      const piece = bar.appendChild(make('b', 's' + stage + (waiting ? ' wait' : '')));
      piece.style.left = 100 * left + '%';
      piece.style.width = 100 * (right - left) + '%';
      piece.dataset.piece = number;
      if (stage === hot) piece.classList.add('hot');
      if (place === chosen && number === at) piece.classList.add('at');
    });
    row.append(make('span', 'ms', ms(r.length)));
    return row;
  }

  function draw(again) {
    if (again) { tip.hidden = true; for (const row of rows.values()) row.remove(); rows.clear(); drawAxis(); }
    spacer.style.height = shown.length * ROW + 'px';
    list.style.height = Math.min(shown.length * ROW + 2, innerHeight * .68) + 'px';
    list.classList.toggle('pale', hot > 0);
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
    const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW) + 9);
    for (const [place, row] of rows) if (place < first || place >= last) { row.remove(); rows.delete(place); }
    for (let place = first; place < last; place++) {
      if (!rows.has(place)) { const row = drawRow(place); rows.set(place, row); list.append(row); }
    }
    $('count').textContent = shown.length === all.length ? `${all.length.toLocaleString('en')} requests`
      : `${shown.length.toLocaleString('en')} of ${all.length.toLocaleString('en')} requests`;
  }

  /* --- what is under the pointer, or chosen with the keys --- */

  function tell(r, number, x, y) {
    const [stage, start, stop, waiting] = r.bar[number], known = stages[stage - 1];
    const row = r.stages.find((item) => item[0] === stage);
    const lines = [`${ms(stop - start)} ms here, ${share(stop - start, r.length)} of the request`];
    if (row) lines.push(`stage in all ${ms(row[2])} ms, ${share(row[2], r.length)}, ${row[3]}`);
    lines.push(`from ${ms(start - r.received)} to ${ms(stop - r.received)} ms after receipt`, `bounded by ${known.bounded}`);
    tip.replaceChildren(make('b', '', `${stage} ${known.label}${waiting ? ', waiting' : ''} · ${r.id}`),
      document.createTextNode(lines.join('\n')));
    tip.hidden = false;
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + 'px';
    tip.style.top = (y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 10 : y + 18) + 'px';
  }

  function open(r) {
    const head = make('h2', '', r.id), close = make('button', '', 'close');
    close.onclick = () => { detail.hidden = true; draw(true); list.focus(); };
    const words = [r.phase, r.reason, r.error, r.model, `${r.prompt ?? '–'} prompt tokens` +
      (r.cached ? ` (${r.cached} cached)` : ''), `${r.output} output tokens`,
      r.preemptions ? `preempted ×${r.preemptions}` : '', r.incomplete ? 'incomplete: events were lost' : ''];
    const figures = [['queue', r.queue], ['prefill', r.prefill], ['TTFT', r.ttft], ['TPOT', r.tpot], ['E2E', r.e2e]];
    const table = make('table'), body = table.appendChild(make('tbody'));
    for (const [number, , length, status, wait, why] of r.all) {
      const line = body.appendChild(make('tr')), name = line.appendChild(make('td'));
      name.append(make('i', 's' + number), document.createTextNode(`${number} ${stages[number - 1].label}`));
      line.append(make('td', 'n', length === null ? '–' : ms(length)),
        make('td', 'n', length === null ? '' : share(length, r.length)),
        make('td', '', status + (wait > .01 && number !== 4 ? `, waited ${ms(wait)} ms` : '') + (why ? `: ${why}` : '')));
    }
    const rest = body.appendChild(make('tr'));
    rest.append(make('td', '', 'unattributed'), make('td', 'n', ms(r.unattributed)));
    const parts = [head, make('p', 'context', words.filter(Boolean).join(' · ')),
      make('p', '', figures.map(([name, value]) => `${name} ${ms(value)}`).join(' · ') + ' ms'), table];
    for (const [name, text] of [['prompt', r.prompt_text], ['output', r.output_text]]) {
      if (text) parts.push(make('p', 'context', name), make('pre', '', text));
    }
    detail.replaceChildren(...parts, close);
    detail.hidden = false;
    draw(true);
  }

  function choose(place, piece) {
    if (!shown.length) return;
    chosen = Math.max(0, Math.min(place, shown.length - 1));
    at = piece;
    const top = chosen * ROW;
    if (top < list.scrollTop) list.scrollTop = top;
    if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
    draw(true);
    list.setAttribute('aria-activedescendant', 'row' + chosen);
    if (!detail.hidden) open(shown[chosen]);
    if (at >= 0) {
      const node = rows.get(chosen)?.querySelector('.at'), box = (node || rows.get(chosen)).getBoundingClientRect();
      tell(shown[chosen], at, box.left + Math.min(box.width, 40), box.bottom - 12);
    }
  }

  const rowOf = (event) => {
    const node = event.target.closest?.('.row');
    return node ? +node.id.slice(3) : -1;
  };
  list.addEventListener('scroll', () => draw(false));
  list.addEventListener('mousemove', (event) => {
    const piece = event.target.dataset?.piece;
    if (piece === undefined) { tip.hidden = true; return; }
    tell(shown[rowOf(event)], +piece, event.clientX, event.clientY);
  });
  list.addEventListener('mouseleave', () => { tip.hidden = true; });
  list.addEventListener('click', (event) => {
    const place = rowOf(event);
    if (place < 0) return;
    chosen = place; at = -1;
    open(shown[place]);
  });

  /* --- zoom and order --- */

  const limits = () => (own ? [0, longest] : [begin, end]);
  function zoom(factor, middle) {
    const [low, high] = limits(), span = Math.min(high - low, Math.max((to - from) * factor, 1e-3));
    const centre = middle ?? (own ? from : (from + to) / 2), left = centre - (centre - from) / (to - from) * span;
    from = Math.max(low, Math.min(left, high - span));
    to = from + span;
    draw(true);
  }
  function pan(share_) {
    const [low, high] = limits(), span = to - from;
    from = Math.max(low, Math.min(from + share_ * span, high - span));
    to = from + span;
    draw(true);
  }
  function reset() { [from, to] = limits(); draw(true); }
  function setAxis(value) {
    own = value;
    $('own').setAttribute('aria-pressed', String(own));
    $('clock').setAttribute('aria-pressed', String(!own));
    reset();
  }
  list.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const box = axis.getBoundingClientRect(), x = (event.clientX - box.left) / box.width;
    const amount = event.deltaY || event.deltaX;
    if (event.shiftKey) pan(amount / 1000); else zoom(Math.exp(amount / 400), from + x * (to - from));
  }, {passive: false});
  $('in').onclick = () => zoom(.5);
  $('out').onclick = () => zoom(2);
  $('whole').onclick = reset;
  $('own').onclick = () => setAxis(true);
  $('clock').onclick = () => setAxis(false);

  const sorts = {received: null, length: (r) => r.length, ttft: (r) => r.ttft ?? -1, queue: (r) => r.queue ?? -1};
  function arrange() {
    const words = $('filter').value.toLowerCase(), key = sorts[$('order').value];
    shown = all.filter((r) => !words || [r.id, r.phase, r.reason, r.error].join('\n').toLowerCase().includes(words));
    if (key) shown = [...shown].sort((a, b) => key(b) - key(a));
    chosen = at = -1;
    list.scrollTop = 0;
    draw(true);
  }
  $('filter').oninput = arrange;
  $('order').onchange = arrange;

  const legend = [...document.querySelectorAll('#legend button')];
  legend.forEach((button, place) => {
    button.onclick = () => {
      hot = hot === place + 1 ? 0 : place + 1;
      legend.forEach((other, number) => other.setAttribute('aria-pressed', String(number + 1 === hot)));
      draw(true);
    };
  });

  function theme() {
    const dark = document.documentElement.dataset.theme === 'dark' ||
      (!document.documentElement.dataset.theme && matchMedia('(prefers-color-scheme: dark)').matches);
    document.documentElement.dataset.theme = dark ? 'light' : 'dark';
  }
  $('theme').onclick = theme;

  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === 'Escape') { tip.hidden = true; at = -1; if (!detail.hidden) detail.hidden = true; list.focus(); draw(true); return; }
    if (['INPUT', 'SELECT'].includes(event.target.tagName)) return;
    const onList = event.target === list || event.target === document.body, r = shown[chosen];
    const page = Math.max(1, Math.floor(list.clientHeight / ROW) - 1);
    const keys = {
      '/': () => $('filter').focus(), t: theme, m: () => setAxis(!own), '+': () => zoom(.5), '=': () => zoom(.5),
      '-': () => zoom(2), 0: reset,
      ...(onList ? {
        ArrowDown: () => choose(chosen + 1, -1), ArrowUp: () => choose(chosen < 0 ? 0 : chosen - 1, -1),
        PageDown: () => choose(chosen + page, -1), PageUp: () => choose(chosen - page, -1),
        Home: () => choose(0, -1), End: () => choose(shown.length - 1, -1),
        ArrowRight: () => (r ? choose(chosen, Math.min(at + 1, r.bar.length - 1)) : choose(0, -1)),
        ArrowLeft: () => (r ? choose(chosen, Math.max(at - 1, 0)) : choose(0, -1)),
        Enter: () => { if (r) open(r); },
      } : {}),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  addEventListener('resize', () => draw(true));
  draw(true);
})();
