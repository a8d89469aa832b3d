// When something was, by the reader's clock.

/** "14:03:12", with the day where it was another one. */
export function clock(date) {
  const time = date.toLocaleTimeString("en-GB");
  return date.toDateString() === new Date().toDateString() ? time : `${date.toLocaleDateString("en-CA")} ${time}`;
}
