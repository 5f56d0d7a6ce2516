/* Stands between a program and the kernel (LD_PRELOAD) and answers one file system call wrongly.

   Counts the calls on files below two folders, from `shim_arm` on, and at the one with the wanted number gives an error,
   cuts it short, hangs, or ends the process. Calls on anything else pass untouched. Descriptors are known by the path
   that they were opened with. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, ERROR, KILL_BEFORE, KILL_AFTER, SHORT, HANG, ERROR_AFTER };
#define FDS 4096
#define LOG (1 << 18)

static char watched[2][PATH_MAX];
static char *names[FDS]; /* of watched descriptors */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int armed, fault, number_of_error;
static long at, calls;
static int alone; /* whether the program's first thread is let be */
static int looks = 1; /* whether calls that only look at names count: how often ranks look is a matter of time */
static char text[LOG];
static size_t written;

void shim_watch(const char *disk, const char *memory) {
    snprintf(watched[0], PATH_MAX, "%s", disk);
    snprintf(watched[1], PATH_MAX, "%s", memory);
}
void shim_arm(long number, int what, int error) {
    pthread_mutex_lock(&lock);
    calls = 0, written = 0, text[0] = 0;
    at = number, fault = what, number_of_error = error, armed = 1;
    pthread_mutex_unlock(&lock);
}
void shim_looks(int count) { looks = count; }
void shim_background(int only) { alone = only; }
long shim_disarm(void) {
    armed = 0;
    return calls;
}
const char *shim_log(void) { return text; }

static int ours(const char *path) {
    for (int i = 0; i < 2; i++) {
        size_t n = strlen(watched[i]);
        if (n && !strncmp(path, watched[i], n) && (path[n] == '/' || !path[n])) return 1;
    }
    return 0;
}
static const char *whole(int dir, const char *path, char *room) {
    if (path[0] == '/') return path;
    char link[64];
    snprintf(link, sizeof link, dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
    ssize_t n = syscall(SYS_readlink, link, room, PATH_MAX - 1);
    if (n < 0) return path;
    room[n] = 0;
    snprintf(room + n, PATH_MAX - n, "/%s", path);
    return room;
}
/* Whether this call is the one, told before it is made. */
static int meet(const char *call, const char *path) {
    if (!armed || !path || !ours(path)) return NONE;
    if (!looks && (!strcmp(call, "list") || !strcmp(call, "stat"))) return NONE;
    if (alone && syscall(SYS_gettid) == getpid()) return NONE;
    pthread_mutex_lock(&lock);
    int hit = armed && calls == at ? fault : NONE;
    const char *base = strrchr(path, '/');
    if (armed && written < LOG - PATH_MAX) {
        const char *where = strncmp(path, watched[0], strlen(watched[0])) ? "shm" : "disk";
        const char *who = syscall(SYS_gettid) == getpid() ? "program" : "background";
        written += snprintf(text + written, LOG - written, "%s %s %s %s\n", where, who, call, base ? base + 1 : path);
    }
    calls++;
    pthread_mutex_unlock(&lock);
    if (hit == KILL_BEFORE) kill(getpid(), SIGKILL), pause();
    if (hit == HANG)
        for (;;) sleep(1000);
    return hit;
}
static void after(int hit) {
    if (hit == KILL_AFTER) kill(getpid(), SIGKILL), pause();
}
#define REAL(name) ({ static typeof(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name); real; })
/* One call that answers -1 where it fails. */
#define CALL(label, path, type, call)                                                                                  \
    int hit = meet(label, path);                                                                                       \
    if (hit == ERROR) return errno = number_of_error, -1;                                                              \
    type answer = (call);                                                                                              \
    int kept = errno;                                                                                                  \
    after(hit);                                                                                                        \
    if (hit == ERROR_AFTER) return errno = number_of_error, -1;                                                        \
    errno = kept

static int keep(int fd, const char *path) {
    if (fd >= 0 && fd < FDS && ours(path)) {
        pthread_mutex_lock(&lock);
        free(names[fd]);
        names[fd] = strdup(path);
        pthread_mutex_unlock(&lock);
    }
    return fd;
}
static const char *name(int fd) { return fd >= 0 && fd < FDS ? names[fd] : NULL; }

#define OPEN(fn)                                                                                                       \
    int fn(const char *path, int flags, ...) {                                                                         \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = va_arg(rest, mode_t);                                                                            \
        va_end(rest);                                                                                                  \
        char room[PATH_MAX];                                                                                           \
        const char *full = whole(AT_FDCWD, path, room);                                                                \
        CALL(flags & O_CREAT ? "create" : flags & O_DIRECTORY ? "opendir" : "open", full, int,                         \
             REAL(fn)(path, flags, mode));                                                                             \
        return keep(answer, full);                                                                                     \
    }
OPEN(open)
OPEN(open64)
#define OPENAT(fn)                                                                                                     \
    int fn(int dir, const char *path, int flags, ...) {                                                                \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = va_arg(rest, mode_t);                                                                            \
        va_end(rest);                                                                                                  \
        char room[PATH_MAX];                                                                                           \
        const char *full = whole(dir, path, room);                                                                     \
        CALL("openat", full, int, REAL(fn)(dir, path, flags, mode));                                                   \
        return keep(answer, full);                                                                                     \
    }
OPENAT(openat)
OPENAT(openat64)
DIR *opendir(const char *path) {
    int hit = meet("list", path);
    if (hit == ERROR || hit == ERROR_AFTER) return errno = number_of_error, NULL;
    DIR *answer = REAL(opendir)(path);
    after(hit);
    return answer;
}
int close(int fd) {
    const char *known = name(fd);
    if (!known) return REAL(close)(fd);
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s", known);
    pthread_mutex_lock(&lock);
    free(names[fd]);
    names[fd] = NULL;
    pthread_mutex_unlock(&lock);
    int hit = meet("close", path);
    int answer = REAL(close)(fd); /* the kernel gives the descriptor back also where it reports an error */
    after(hit);
    if (hit == ERROR || hit == ERROR_AFTER) return errno = number_of_error, -1;
    return answer;
}
#define BYTES(fn, label, rest_of, arguments, ...)                                                                      \
    ssize_t fn rest_of {                                                                                               \
        int hit = meet(label, name(fd));                                                                               \
        if (hit == ERROR) return errno = number_of_error, -1;                                                          \
        if (hit == SHORT) { __VA_ARGS__; }                                                                                   \
        ssize_t answer = REAL(fn) arguments;                                                                           \
        int kept = errno;                                                                                              \
        after(hit);                                                                                                    \
        if (hit == ERROR_AFTER) return errno = number_of_error, -1;                                                    \
        errno = kept;                                                                                                  \
        return answer;                                                                                                 \
    }
/* A third, and of an odd length only where the descriptor takes that. */
#define LESS n = n > 8192 ? n / 3 / 4096 * 4096 : fcntl(fd, F_GETFL) & O_DIRECT ? n : (n + 2) / 3
BYTES(pwrite, "pwrite", (int fd, const void *data, size_t n, off_t o), (fd, data, n, o), LESS)
BYTES(pwrite64, "pwrite", (int fd, const void *data, size_t n, off64_t o), (fd, data, n, o), LESS)
BYTES(write, "write", (int fd, const void *data, size_t n), (fd, data, n), LESS)
BYTES(pread, "pread", (int fd, void *data, size_t n, off_t o), (fd, data, n, o), LESS)
BYTES(pread64, "pread", (int fd, void *data, size_t n, off64_t o), (fd, data, n, o), LESS)
BYTES(read, "read", (int fd, void *data, size_t n), (fd, data, n), LESS)
BYTES(preadv64v2, "pread", (int fd, const struct iovec *v, int c, off64_t o, int f), (fd, v, c, o, f), {
    struct iovec one = {v[0].iov_base, v[0].iov_len > 8192 ? v[0].iov_len / 3 / 4096 * 4096 : v[0].iov_len};
    return REAL(preadv64v2)(fd, &one, 1, o, f);
})

#define OF_FD(fn, label, rest_of, arguments)                                                                           \
    int fn rest_of {                                                                                                   \
        CALL(label, name(fd), int, REAL(fn) arguments);                                                                \
        return answer;                                                                                                 \
    }
OF_FD(fsync, "fsync", (int fd), (fd))
OF_FD(fdatasync, "fdatasync", (int fd), (fd))
OF_FD(ftruncate, "ftruncate", (int fd, off_t n), (fd, n))
OF_FD(ftruncate64, "ftruncate", (int fd, off64_t n), (fd, n))
OF_FD(fallocate, "fallocate", (int fd, int m, off_t o, off_t n), (fd, m, o, n))
OF_FD(fchmod, "fchmod", (int fd, mode_t m), (fd, m))
OF_FD(fstatvfs64, "statvfs", (int fd, struct statvfs64 *s), (fd, s))

#define OF_PATH(fn, label, dir, path, rest_of, arguments)                                                              \
    int fn rest_of {                                                                                                   \
        char room[PATH_MAX];                                                                                           \
        CALL(label, whole(dir, path, room), int, REAL(fn) arguments);                                                  \
        return answer;                                                                                                 \
    }
OF_PATH(rename, "rename", AT_FDCWD, b, (const char *a, const char *b), (a, b))
OF_PATH(renameat, "rename", e, b, (int d, const char *a, int e, const char *b), (d, a, e, b))
OF_PATH(unlink, "unlink", AT_FDCWD, p, (const char *p), (p))
OF_PATH(unlinkat, f & AT_REMOVEDIR ? "rmdir" : "unlink", d, p, (int d, const char *p, int f), (d, p, f))
OF_PATH(mkdir, "mkdir", AT_FDCWD, p, (const char *p, mode_t m), (p, m))
OF_PATH(rmdir, "rmdir", AT_FDCWD, p, (const char *p), (p))
OF_PATH(link, "link", AT_FDCWD, b, (const char *a, const char *b), (a, b))
OF_PATH(statvfs64, "statvfs", AT_FDCWD, p, (const char *p, struct statvfs64 *s), (p, s))
OF_PATH(truncate64, "truncate", AT_FDCWD, p, (const char *p, off64_t n), (p, n))
OF_PATH(stat64, "stat", AT_FDCWD, p, (const char *p, struct stat64 *s), (p, s))
