//! The server with tiny random models, over its socket.

mod answers;
mod formats;
mod guests;
mod lifecycle;
mod limits;
mod models;
mod running;
