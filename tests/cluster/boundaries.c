/* Loaded before libc (LD_PRELOAD): tells of every write, fsync, rename and the like below a folder, and kills its
   process at one of them. Such a call is a boundary; they are counted over all processes that share a counter.

   BOUNDARIES_UNDER  the folder
   BOUNDARIES_LOG    a file that gets a line for each boundary, written when the call is over
   BOUNDARIES_SLOW   milliseconds that each fsync takes longer
   boundaries_arm(counter, kill_at, half): SIGKILL before boundary kill_at (from 0; -1: never), of a write after half
   of its bytes. `counter` is in memory that processes share; counter[32] and on are further processes that are killed
   at the same moment, up to a zero. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static long own_counter, *counter = &own_counter, kill_at = -1;
static int half_done;

void boundaries_arm(long *shared, long at, int half) { counter = shared ? shared : &own_counter; kill_at = at; half_done = half; }

static int inside(const char *path) {
    const char *under = getenv("BOUNDARIES_UNDER");
    return path && under && strncmp(path, under, strlen(under)) == 0;
}

static const char *path_of(int fd, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, buffer, PATH_MAX - 1);
    if (length < 0) return NULL;
    buffer[length] = 0;
    return buffer;
}

static void die(void) {
    if (counter != &own_counter)
        for (int at = 32; counter[at] && at < 64; at++)
            if (counter[at] != getpid()) kill(counter[at], SIGKILL);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int reached(void) { return __atomic_fetch_add(counter, 1, __ATOMIC_SEQ_CST) == kill_at; }

static void tell(const char *call, const char *one, const char *other, const void *data, long size) {
    const char *name = getenv("BOUNDARIES_LOG");
    if (!name) return;
    long room = 3 * PATH_MAX + 2 * (size > 0 ? size : 0) + 64;
    char *line = malloc(room);
    long used = snprintf(line, room, "%s\t%s\t%s\t", call, one, other ? other : "");
    for (long at = 0; data && at < size; at++) used += sprintf(line + used, "%02x", ((const unsigned char *)data)[at]);
    line[used++] = '\n';
    int fd = syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND, 0600);
    syscall(SYS_write, fd, line, used);
    syscall(SYS_close, fd);
    free(line);
}

ssize_t write(int fd, const void *data, size_t size) {
    char buffer[PATH_MAX];
    const char *path = path_of(fd, buffer);
    if (!inside(path)) return syscall(SYS_write, fd, data, size);
    if (reached()) {
        if (half_done) syscall(SYS_write, fd, data, size / 2);
        die();
    }
    ssize_t done = syscall(SYS_write, fd, data, size);
    if (done > 0) tell("write", path, NULL, data, done);
    return done;
}

int fsync(int fd) {
    char buffer[PATH_MAX];
    const char *path = path_of(fd, buffer);
    if (!inside(path)) return syscall(SYS_fsync, fd);
    if (reached()) die();
    const char *slow = getenv("BOUNDARIES_SLOW");
    if (slow) usleep(1000 * atoi(slow));
    int failed = syscall(SYS_fsync, fd);
    if (!failed) tell("fsync", path, NULL, NULL, 0);
    return failed;
}

static int opened(int folder, const char *path, int flags, mode_t mode) {
    int makes = (flags & O_CREAT) && inside(path);
    if (makes && reached()) die();
    int fd = syscall(SYS_openat, folder, path, flags, mode);
    if (makes && fd >= 0) tell("create", path, NULL, NULL, 0);
    return fd;
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }

#define OF_PATHS(call, word, one, other, ...)                          \
    {                                                                  \
        if (!inside(one)) return syscall(call, __VA_ARGS__);           \
        if (reached()) die();                                          \
        int failed = syscall(call, __VA_ARGS__);                       \
        if (!failed) tell(word, one, other, NULL, 0);                  \
        return failed;                                                 \
    }

int rename(const char *one, const char *other) OF_PATHS(SYS_rename, "rename", one, other, one, other)
int unlink(const char *one) OF_PATHS(SYS_unlink, "unlink", one, NULL, one)
int mkdir(const char *one, mode_t mode) OF_PATHS(SYS_mkdir, "mkdir", one, NULL, one, mode)
int rmdir(const char *one) OF_PATHS(SYS_rmdir, "rmdir", one, NULL, one)

int unlinkat(int folder, const char *name, int flags) {
    char base[PATH_MAX], whole[2 * PATH_MAX];
    if (folder == AT_FDCWD || name[0] == '/' || !path_of(folder, base)) snprintf(whole, sizeof whole, "%s", name);
    else snprintf(whole, sizeof whole, "%s/%s", base, name);
    if (!inside(whole)) return syscall(SYS_unlinkat, folder, name, flags);
    if (reached()) die();
    int failed = syscall(SYS_unlinkat, folder, name, flags);
    if (!failed) tell(flags & AT_REMOVEDIR ? "rmdir" : "unlink", whole, NULL, NULL, 0);
    return failed;
}
