/* An NCCL for tests: the functions that dflash calls, between processes of one machine, in host
 * memory. It is built as libnccl.so.2 and found by the loader like NVIDIA's.
 *
 * A call is complete when it returns. Before any data moves the ranks compare their calls: an
 * operation, size or type that differs from rank 0's is an error for all, where NVIDIA's library
 * would hang or mix up data. As with NVIDIA's between GPUs of one machine, the death of a peer is not
 * reported: a call then waits until the communicator is aborted, and returns without an error.
 *
 * DFLASH_TEST_NCCL_LOG names a directory, where every rank writes a line for each call to rank-N.
 * DFLASH_TEST_NCCL_FAULT=RANK:CALL:WHAT makes the rank's call of that number, counted from 1 (0 is
 * joining), fail, but not after a restart: status=N returns N; memory returns a GPU's out-of-memory
 * error; hang never joins the call; async=N reports N as the asynchronous error and never joins;
 * kill ends the process in the middle of the call.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, UNHANDLED_CUDA = 1, SYSTEM = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5 };
enum { INT64 = 4, FLOAT32 = 7, FLOAT64 = 8, BFLOAT16 = 9 };
enum { SUM = 0, MAX = 2 };
enum kind { ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER };

#define MAX_RANKS 16
#define SLOT ((size_t)1 << 20)

static const char *const KINDS[] = {"all-reduce", "broadcast", "all-gather", "reduce-scatter"};

struct call {
    enum kind kind;
    size_t count;
    int type;
    int detail; /* the operation, or the root */
};

/* Memory shared by the ranks. */
struct shared {
    atomic_int arrived;
    atomic_uint generation;
    struct call calls[MAX_RANKS];
    char slots[MAX_RANKS][SLOT];
};

struct comm {
    struct shared *shared;
    int rank, size;
    int call; /* number of the last */
    atomic_int running, aborted, async;
    char last[256];
};

typedef struct { char text[128]; } unique_id;

/* Marks this library; NVIDIA's has no such symbol. */
int dflash_nccl_takes_host_memory = 1;

static void note(int rank, const char *format, ...) {
    const char *dir = getenv("DFLASH_TEST_NCCL_LOG");
    if (!dir) return;
    char path[4096], line[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    snprintf(path, sizeof path, "%s/rank-%d", dir, rank);
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file < 0 || write(file, line, length) != length) abort();
    close(file);
}

/* The fault to inject into this call, if any. */
static const char *fault(const struct comm *comm) {
    const char *restart = getenv("TORCHELASTIC_RESTART_COUNT");
    const char *text = getenv("DFLASH_TEST_NCCL_FAULT");
    int rank, call, length = 0;
    if (!text || (restart && strcmp(restart, "0") != 0)) return NULL;
    if (sscanf(text, "%d:%d:%n", &rank, &call, &length) < 2 || !length) abort();
    return rank == comm->rank && call == comm->call ? text + length : NULL;
}

static int wait_for_abort(struct comm *comm) {
    while (!atomic_load(&comm->aborted)) usleep(200);
    return SUCCESS;
}

/* 0 to continue; otherwise the call's return value is in `status`. */
static int goes_wrong(struct comm *comm, int *status) {
    const char *what = fault(comm);
    if (!what) return 0;
    *status = SUCCESS;
    if (sscanf(what, "status=%d", status) == 1) {
        snprintf(comm->last, sizeof comm->last, "a fault of the test's own");
    } else if (strcmp(what, "memory") == 0) {
        *status = UNHANDLED_CUDA;
        snprintf(comm->last, sizeof comm->last, "Cuda failure 2 'out of memory'");
    } else if (strcmp(what, "hang") == 0) {
        *status = wait_for_abort(comm);
    } else if (sscanf(what, "async=%d", status) == 1) {
        atomic_store(&comm->async, *status);
        *status = wait_for_abort(comm);
    } else if (strcmp(what, "kill") == 0) {
        raise(SIGKILL);
    } else {
        abort();
    }
    return 1;
}

/* Waits for all ranks; nonzero if aborted. */
static int meet(struct comm *comm) {
    struct shared *shared = comm->shared;
    unsigned generation = atomic_load(&shared->generation);
    if (atomic_fetch_add(&shared->arrived, 1) + 1 == comm->size) {
        atomic_store(&shared->arrived, 0);
        atomic_fetch_add(&shared->generation, 1);
        return 0;
    }
    while (atomic_load(&shared->generation) == generation) {
        if (atomic_load(&comm->aborted)) return 1;
        usleep(50);
    }
    return 0;
}

static size_t width(int type) {
    switch (type) {
    case INT64: case FLOAT64: return 8;
    case FLOAT32: return 4;
    case BFLOAT16: return 2;
    default: return 0;
    }
}

static float widened(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* Rounds to nearest, ties to even; the tests use no NaN. */
static uint16_t narrowed(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (uint16_t)((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

#define COMBINE(type) do { \
        type *into = to; const type *other = from; \
        for (size_t i = 0; i < count; i++) \
            into[i] = operation == MAX ? (other[i] > into[i] ? other[i] : into[i]) : into[i] + other[i]; \
    } while (0)

static void combine(void *to, const void *from, size_t count, int type, int operation) {
    if (type == INT64) COMBINE(int64_t);
    if (type == FLOAT32) COMBINE(float);
    if (type == FLOAT64) COMBINE(double);
    if (type == BFLOAT16) {
        uint16_t *into = to;
        const uint16_t *other = from;
        for (size_t i = 0; i < count; i++) {
            float a = widened(into[i]), b = widened(other[i]);
            into[i] = narrowed(operation == MAX ? (b > a ? b : a) : a + b);
        }
    }
}

/* Whether all ranks make the same call; prints any difference. */
static int alike(struct comm *comm) {
    const struct call *first = &comm->shared->calls[0];
    for (int rank = 1; rank < comm->size; rank++) {
        const struct call *other = &comm->shared->calls[rank];
        if (memcmp(first, other, sizeof *first) == 0) continue;
        snprintf(comm->last, sizeof comm->last,
                 "rank 0 calls %s of %zu, rank %d %s of %zu", KINDS[first->kind], first->count,
                 rank, KINDS[other->kind], other->count);
        note(comm->rank, "MISMATCH %s", comm->last);
        return 0;
    }
    return 1;
}

/* Exchanges a piece that fits a slot: combines or copies the ranks' inputs into the outputs. */
static void piece(struct comm *comm, const char *in, char *out, size_t count, const struct call *call) {
    struct shared *shared = comm->shared;
    size_t bytes = count * width(call->type);
    if (in) memcpy(shared->slots[comm->rank], in, bytes);
    if (meet(comm)) return;
    if (out && call->kind == BROADCAST) {
        memcpy(out, shared->slots[call->detail], bytes);
    } else if (out && call->kind == ALL_GATHER) {
        for (int rank = 0; rank < comm->size; rank++)
            memcpy(out + rank * call->count * width(call->type), shared->slots[rank], bytes);
    } else if (out) {
        /* `out` may be `in`, which is in the slot. Summed in rank order: the same bytes on all. */
        memcpy(out, shared->slots[0], bytes);
        for (int rank = 1; rank < comm->size; rank++)
            combine(out, shared->slots[rank], count, call->type, call->detail);
    }
    meet(comm);
}

static int pieces(struct comm *comm, const char *in, char *out, const struct call *call) {
    size_t most = SLOT / width(call->type);
    for (size_t done = 0; done < call->count; done += most) {
        size_t count = call->count - done < most ? call->count - done : most;
        size_t offset = done * width(call->type);
        piece(comm, in ? in + offset : NULL, out ? out + offset : NULL, count, call);
        if (atomic_load(&comm->aborted)) break;
    }
    return SUCCESS;
}

static int run(struct comm *comm, const char *in, char *out, const struct call *call) {
    /* Including the padding, which is compared too. */
    memcpy(&comm->shared->calls[comm->rank], call, sizeof *call);
    if (meet(comm)) return SUCCESS;
    int same = alike(comm);
    if (meet(comm)) return SUCCESS;
    if (!same) return INVALID_USAGE;
    if (call->kind == BROADCAST) return pieces(comm, comm->rank == call->detail ? in : NULL, out, call);
    if (call->kind != REDUCE_SCATTER) return pieces(comm, in, out, call);
    for (int rank = 0; rank < comm->size; rank++)
        pieces(comm, in + rank * call->count * width(call->type), rank == comm->rank ? out : NULL, call);
    return SUCCESS;
}

static int collective(struct comm *comm, const void *in, void *out, enum kind kind, size_t count,
                      int type, int detail) {
    int status;
    struct call call;
    memset(&call, 0, sizeof call);
    call.kind = kind;
    call.count = count;
    call.type = type;
    call.detail = detail;
    if (atomic_load(&comm->aborted)) {
        note(comm->rank, "MISUSE a call after the abort");
        return INVALID_ARGUMENT;
    }
    if (atomic_fetch_add(&comm->running, 1)) note(comm->rank, "MISUSE two calls at once");
    comm->call++;
    note(comm->rank, "%d %s %zu type %d %s %d", comm->call, KINDS[kind], count, type,
         kind == BROADCAST ? "root" : "op", detail);
    if (!width(type)) {
        snprintf(comm->last, sizeof comm->last, "no type %d here", type);
        status = INVALID_ARGUMENT;
    } else if (!goes_wrong(comm, &status)) {
        status = run(comm, in, out, &call);
    }
    atomic_fetch_sub(&comm->running, 1);
    return status;
}

int ncclGetUniqueId(unique_id *id) {
    static atomic_int made;
    memset(id, 0, sizeof *id);
    snprintf(id->text, sizeof id->text, "/dflash-nccl-%d-%d", getpid(), atomic_fetch_add(&made, 1));
    int file = shm_open(id->text, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0 || ftruncate(file, sizeof(struct shared)) != 0) return SYSTEM;
    close(file);
    return SUCCESS;
}

int ncclCommInitRank(struct comm **made, int size, unique_id id, int rank) {
    int status;
    struct comm *comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->size = size;
    note(rank, "join of %d", size);
    if (size > MAX_RANKS) return INVALID_ARGUMENT;
    int file = shm_open(id.text, O_RDWR, 0600);
    if (file < 0) return SYSTEM;
    comm->shared = mmap(NULL, sizeof *comm->shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (comm->shared == MAP_FAILED) return SYSTEM;
    int wrong = goes_wrong(comm, &status);
    if (meet(comm)) return SYSTEM;
    if (rank == 0) shm_unlink(id.text);
    if (wrong) return status;
    *made = comm;
    return SUCCESS;
}

int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, struct comm *comm, void *stream) {
    (void)stream;
    return collective(comm, in, out, ALL_REDUCE, count, type, op);
}

int ncclBroadcast(const void *in, void *out, size_t count, int type, int root, struct comm *comm, void *stream) {
    (void)stream;
    return collective(comm, in, out, BROADCAST, count, type, root);
}

int ncclAllGather(const void *in, void *out, size_t count, int type, struct comm *comm, void *stream) {
    (void)stream;
    return collective(comm, in, out, ALL_GATHER, count, type, 0);
}

int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, struct comm *comm, void *stream) {
    (void)stream;
    return collective(comm, in, out, REDUCE_SCATTER, count, type, op);
}

int ncclCommGetAsyncError(struct comm *comm, int *fault) {
    if (atomic_load(&comm->aborted)) note(comm->rank, "MISUSE asked after the abort");
    *fault = atomic_load(&comm->async);
    return SUCCESS;
}

/* Keeps the memory: a call may still be using it. */
int ncclCommAbort(struct comm *comm) {
    note(comm->rank, "%s", atomic_exchange(&comm->aborted, 1) ? "MISUSE a second abort" : "abort");
    return SUCCESS;
}

const char *ncclGetErrorString(int status) {
    switch (status) {
    case UNHANDLED_CUDA: return "unhandled cuda error";
    case SYSTEM: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case 6: return "remote process exited or there was a network error";
    default: return "unknown result code";
    }
}

const char *ncclGetLastError(struct comm *comm) { return comm ? comm->last : ""; }
