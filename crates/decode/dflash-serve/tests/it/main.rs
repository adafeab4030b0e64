//! The server with tiny random models, over its socket.

mod answers;
mod echo;
mod formats;
mod guests;
mod lifecycle;
mod limits;
mod models;
mod page;
mod room;
mod running;
mod tools;
